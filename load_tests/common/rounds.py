"""Times calls against each other in one process: in every round each runs once, in random order.

Drift of the machine affects all calls of a round alike, so calls are compared within a round.
Knows nothing of what is timed.
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

_HEAD_START = 1_000_000  # cycles of the device's clock, about half a millisecond
MIN_ROUNDS = 6  # fewest with which the range of all values holds the true median in 95 % of cases


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        """Null for infinity, which JSON lacks."""
        return {
            name: value if math.isfinite(value) else None for name, value in asdict(self).items()
        }


def clock_of(wanted: str | None, device: torch.device) -> Clock:
    """The wall clock if `wanted`; else the device's own on CUDA, elsewhere processor time."""
    if wanted == "wall":
        return "wall"
    return "cuda" if device.type == "cuda" else "processor"


def seconds(call: Call, clock: Clock) -> float:
    """The time that one call takes."""
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


def median_of(values: Sequence[float]) -> Interval:
    """The median, with an interval between two of the values, whatever their distribution.

    The number of values below the true median is binomial, as the heads of coins are, which gives
    the two (Conover, "Practical Nonparametric Statistics", section 3.2). With fewer than
    MIN_ROUNDS values no two suffice, and the interval is infinite.
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
    """Ratios of `call` to `base`, round by round."""
    return [each[call] / each[base] for each in taken]


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
