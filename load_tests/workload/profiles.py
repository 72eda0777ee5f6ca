"""Parses `--profile`, which says when requests are sent, and finds a sweep's profiles."""

import re
from collections.abc import Awaitable, Callable
from typing import Literal

from ropewalk.load_tests.common.types import Profile

PROFILES = {
    "sync": "one request at a time",
    "closed:N": "N workers; each sends its next request when its last one is answered",
    "poisson:RATE": "random arrivals, RATE requests per second on average",
    "gamma:RATE:BURSTINESS": "the same; more bursty if BURSTINESS is below 1, more even above",
    "sweep": "sync, a closed loop that saturates, and Poisson rates between the two",
}
SWEEP_RATES = 4
_MOST_WORKERS = 64
_LEAST_GAIN = 1.1  # in throughput, from twice the workers; less means saturation
_NUMBER = r"\d+(?:\.\d+)?"
_SHAPES = re.compile(
    rf"sync|sweep|closed:(?P<workers>[1-9]\d*)|poisson:(?P<poisson>{_NUMBER})"
    rf"|gamma:(?P<gamma>{_NUMBER}):(?P<burstiness>{_NUMBER})"
)


def parse_profile(text: str) -> Profile | Literal["sweep"]:
    """One of PROFILES. Raises ValueError."""
    match = _SHAPES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no profile; use {', '.join(PROFILES)}")
    if text == "sweep":
        return "sweep"
    if match["workers"]:
        return Profile("closed", concurrency=int(match["workers"]))
    if match["poisson"]:
        return Profile("poisson", rate=_positive(match["poisson"], text))
    if match["gamma"]:
        burstiness = _positive(match["burstiness"], text)
        return Profile("gamma", rate=_positive(match["gamma"], text), burstiness=burstiness)
    return Profile("sync")


async def find_sweep(throughput: Callable[[Profile], Awaitable[float]]) -> list[Profile]:
    """The profiles between an idle server and a saturated one, from a few calls of `throughput`.

    `throughput` measures requests per second. Workers are doubled until that gains less than a
    tenth. The Poisson rates are evenly spaced between the rates of one worker and of saturation.
    """
    idle = await throughput(Profile("sync"))
    saturated, workers = idle, 1
    while workers < _MOST_WORKERS:
        rate = await throughput(Profile("closed", concurrency=2 * workers))
        gained = rate > saturated * _LEAST_GAIN
        saturated, workers = max(saturated, rate), 2 * workers
        if not gained:
            break
    # Without a gain from batching the two ends would coincide.
    low = min(idle, saturated / 2)
    step = (saturated - low) / (SWEEP_RATES + 1)
    rates = [_round(low + step * number) for number in range(1, SWEEP_RATES + 1)]
    return [
        Profile("sync"),
        *(Profile("poisson", rate=rate) for rate in rates),
        Profile("closed", concurrency=workers),
    ]


def _round(rate: float) -> float:
    """Three digits, so that a label shows exactly the rate that was used."""
    return float(f"{rate:.3g}")


def _positive(number: str, text: str) -> float:
    value = float(number)
    if value <= 0:
        raise ValueError(f"{text!r}: a rate and a burstiness must be above 0")
    return value
