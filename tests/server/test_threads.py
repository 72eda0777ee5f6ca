"""OpenMP keeps threads for whoever computes next, and for nobody else."""

import asyncio
import math
import platform
import threading
import time
from pathlib import Path

import pytest
import torch

from server.threads import aside, end_idle_threads

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
    return len(list(Path("/proc/self/task").iterdir()))


def become(count):
    """Whether there are so many threads, soon: one that ends is counted until it has."""
    until = time.monotonic() + 5
    while threads() != count and time.monotonic() < until:
        time.sleep(0.01)
    return threads() == count


def test_idle_threads_end_and_come_back():
    least = threads()
    computed()
    assert threads() == least + 2
    end_idle_threads()
    assert become(least)
    assert computed() == pytest.approx(math.e)


def test_those_of_other_threads_stay():
    least = threads()
    computed()
    other = threading.Thread(target=end_idle_threads)
    other.start()
    other.join()
    assert threads() == least + 2


def test_what_is_computed_aside_leaves_none():
    async def both():
        assert await aside(computed) == pytest.approx(math.e)
        assert become(least + 1)  # asyncio's own
        with pytest.raises(ZeroDivisionError):
            await aside(lambda: computed() / 0)
        assert become(least + 1)

    least = threads()
    asyncio.run(both())
