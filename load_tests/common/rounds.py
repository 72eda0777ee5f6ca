"""Times calls against each other in one process: in every round each runs once, in random order.

Drift of the machine affects all calls of a round alike, so calls are compared within a round.
Knows nothing of what is timed.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from ropewalk.report.statistics import Estimate

Clock = Literal["processor", "wall", "cuda"]
Call = Callable[[], object]

_HEAD_START = 1_000_000  # cycles of the device's clock, about half a millisecond


def clock_of(wanted: str | None, device: torch.device) -> Clock:
    """The wall clock if `wanted`; else the device's own on CUDA, elsewhere processor time."""
    if wanted == "wall":
        return "wall"
    return "cuda" if device.type == "cuda" else "processor"


def seconds(call: Call, clock: Clock) -> float:
    if clock == "cuda":
        return _on_device(call)
    read = time.process_time if clock == "processor" else time.perf_counter
    _wait()
    began = read()
    call()
    _wait()
    return read() - began


def rounds(
    calls: Mapping[str, Call], count: int, clock: Clock, seed: str
) -> Iterator[dict[str, float]]:
    """Seconds of each call, for `count` rounds after one that is discarded."""
    order, names = random.Random(seed), list(calls)
    for number in range(count + 1):
        order.shuffle(names)
        taken = {name: seconds(calls[name], clock) for name in names}
        if number:
            yield {name: taken[name] for name in calls}


def ratios(taken: Sequence[Mapping[str, float]], call: str, base: str) -> list[float]:
    return [each[call] / each[base] for each in taken]


def interval_json(found: Estimate) -> dict[str, float | None]:
    """A median for a file: null for infinity, which JSON lacks."""
    ends = {"median": found.value, "low": found.low, "high": found.high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}


def _wait() -> None:
    """Wait until a GPU, if one is in use, has finished its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _on_device(call: Call) -> float:
    """The time between two events on the current stream, which is idle before.

    The device sleeps first, so the host's time to launch counts only as far as it exceeds that.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    began, ended = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return milliseconds / 1000
