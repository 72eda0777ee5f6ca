"""No part runs more lines of Python than its work: counted, so that no clock can be wrong."""

import sys

import pytest
import torch

from ropewalk.load_tests.micro.in_process import decoders
from ropewalk.load_tests.micro.scaling_parts import SIZES, bookkeeping, parts

CALLS = 16  # of a step: one block of each request, so that both sizes begin as many
SMALL_AND_LARGE = {
    "batch": (2, 16),
    "context": (64, 1024),
    "pool": (100, 800),
    "queue": (10, 500),
    "prompt": (600, 2400),
    "answer": (30, 120),
}


def lines(call) -> int:
    """Of Python, each time that it is run; a loop counts as often as it goes around."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def repeated(call, times: int):
    def calls():
        for _ in range(times):
            call()

    return calls


@pytest.mark.parametrize(
    "part", bookkeeping("not asked for"), ids=lambda part: f"{part.name}, {part.along}"
)
def test_no_part_runs_more_lines_than_its_work(part):
    small, large = SMALL_AND_LARGE[part.along]
    once = part.along in ("prompt", "answer")
    few, many = (
        lines(repeated(part.prepare(size), 1 if once else CALLS)) for size in (small, large)
    )
    assert few > 10
    assert many <= 1.05 * few * (large / small) ** part.power


def test_a_loop_over_the_pool_would_be_seen():
    def call(size):
        return lambda: [each + 1 for each in range(size)]

    assert lines(call(1000)) > 5 * lines(call(100))


def test_every_size_has_a_part():
    device = torch.device("cpu")
    (decoder,) = decoders(
        "small", ["nope"], context=32, dtype=torch.float32, device=device, kernels="none"
    ).values()
    found = parts(decoder, {"batch": 2, "context": 32}, "not asked for")
    assert {part.along for part in found} == set(SIZES) == set(SMALL_AND_LARGE)
    passes = [part for part in found if part.on_device]
    assert [part.along for part in passes] == ["batch", "context"]
    assert passes[0].prepare(2)().shape == (2, 4096)
    assert passes[1].prepare(32)().shape == (1, 4096)
