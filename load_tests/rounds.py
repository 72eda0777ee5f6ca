"""Calls timed against each other in one process: in every round each runs once, in random order.

What drifts on the machine drifts for all of a round alike, so calls are compared within their
round. Knows nothing of what is timed.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

import torch

Clock = Literal["processor", "wall", "cuda"]
Call = Callable[[], object]

_HEAD_START = 1_000_000  # of a device's clock, about half a millisecond
MIN_ROUNDS = 6  # from which the range of all ratios holds their median in 95 % of cases


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and where the true one lies in 95 % of cases."""

    median: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        """JSON knows no infinity."""
        return {
            name: value if math.isfinite(value) else None for name, value in asdict(self).items()
        }


def clock_of(wanted: str | None, device: torch.device) -> Clock:
    """The device's own on CUDA, the processor time of this process elsewhere, unless told."""
    if wanted == "wall":
        return "wall"
    return "cuda" if device.type == "cuda" else "processor"


def seconds(call: Call, clock: Clock) -> float:
    """What one call takes."""
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
    """Seconds of each call, for `count` rounds after one that is not told of."""
    order, names = random.Random(seed), list(calls)
    for number in range(count + 1):
        order.shuffle(names)
        taken = {name: seconds(calls[name], clock) for name in names}
        if number:
            yield {name: taken[name] for name in calls}


def median_of(values: Sequence[float]) -> Interval:
    """The interval is between two of the values themselves, whatever their distribution.

    As many values lie below the true median as coins show heads, so the binomial distribution
    says which two (Conover, "Practical Nonparametric Statistics", section 3.2). With fewer than
    MIN_ROUNDS values no two do, and the interval is infinite.
    """
    ordered, count = sorted(values), len(values)
    middle = median(ordered)
    if count < MIN_ROUNDS:
        return Interval(middle, -math.inf, math.inf)
    outside, missed = 0, 2 / 2**count  # values left out at each end; how often that is wrong
    while (missed := missed + 2 * math.comb(count, outside + 1) / 2**count) <= 0.05:
        outside += 1
    return Interval(middle, ordered[outside], ordered[-1 - outside])


def ratios(taken: Sequence[Mapping[str, float]], call: str, base: str) -> list[float]:
    """Of `call` to `base`, round by round."""
    return [each[call] / each[base] for each in taken]


def _wait() -> None:
    """Until a GPU, if there is one in use, has done what it was told."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _on_device(call: Call) -> float:
    """Between two events of the current stream, with nothing of another call before the first.

    The device is busy at first, so what the host takes until it launches counts only beyond that.
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
