"""OpenMP keeps threads for whoever computes next, and for nobody else."""

import asyncio
import math
import platform
import threading
import time
from pathlib import Path

import pytest
import torch

from ropewalk.server.engine.openmp import aside, end_idle_threads, use_all_threads

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="counted in /proc")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    end_idle_threads()
    time.sleep(0.1)
    yield
    torch.set_num_threads(before)


def computed():
    """By several threads: so large are the numbers."""
    return float(torch.ones(4_000_000).exp()[0])


def threads():
    """Numbers of those of this process: one that has just been joined can still be among them."""
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def soon(holds):
    """Whether it does, within seconds: a thread that ends is listed until it has."""
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def kept_after_computing():
    before = threads()
    computed()
    kept = threads() - before
    assert len(kept) == 2
    return kept


def test_idle_threads_end_and_come_back():
    kept = kept_after_computing()
    end_idle_threads()
    assert soon(lambda: not kept & threads())
    assert computed() == pytest.approx(math.e)


def test_those_of_other_threads_stay():
    kept = kept_after_computing()
    other = threading.Thread(target=end_idle_threads)
    other.start()
    other.join()
    assert soon(lambda: other.native_id not in threads())
    assert kept <= threads()


async def leaves_none(compute):
    """While asyncio's own thread still waits: with it, OpenMP's would go too."""
    before = threads()
    try:
        await aside(compute)
    finally:
        assert soon(lambda: len(threads() - before) == 1)


def test_what_is_computed_aside_leaves_none():
    asyncio.run(leaves_none(computed))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(leaves_none(lambda: computed() / 0))


def test_what_is_computed_aside_is_returned():
    assert asyncio.run(aside(computed)) == pytest.approx(math.e)


def test_a_thread_of_ones_own_computes_in_as_many_as_were_asked_for(kernels):
    """OpenMP would take one for each core, whatever torch was told of in another thread."""
    counts = []

    def compute():
        use_all_threads()
        before = threads()
        kernels.largest(torch.ones(64, 64))
        counts.append(len(threads() - before))
        end_idle_threads()

    for count in (3, 2, 1):
        torch.set_num_threads(count)
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert counts == [2, 1, 0]
