"""The figures of one run, by their definitions. differences.py compares variants.

Latencies are those of requests that were served, stayed to the end and began in the steady
window, so not of a closed loop's first wave, whose requests queue behind each other, nor of the
first of an open loop, which find an empty server.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ropewalk.load_tests.common.types import Outcome, Run

DEFINITIONS: Mapping[str, str] = {
    "ttft": "time to first token: intended start to the first chunk with text",
    "ttft_from_wire": "time to first token from the moment when the request was actually sent",
    "itl": "inter-token latency: gaps between chunks, each divided by its chunk's tokens, pooled",
    "tpot": "time per output token: (end − first text) / (tokens − 1), once per request",
    "e2e": "time from the intended start to the end of the answer",
    "output_tokens_per_s": "tokens that arrived in the steady window, per second of it",
    "total_tokens_per_s": "the same plus each prompt's tokens, counted when its answer begins",
}
LATENCIES = ("ttft", "ttft_from_wire", "itl", "tpot", "e2e")
RATES = ("output_tokens_per_s", "total_tokens_per_s")
PERCENTILES = (50, 90, 99)
METRICS = (*(f"{name}_p{share}" for name in LATENCIES for share in PERCENTILES), *RATES)
"""Every figure that a run can have."""

_LAG_LIMIT = 0.05  # share of the TTFT above which the client was too slow to measure this server
_ONCE_PER_REQUEST = ("ttft", "ttft_from_wire", "tpot", "e2e")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_OBJECTIVE = re.compile(r"(?P<latency>\w+)=(?P<number>\d+(\.\d+)?)(?P<unit>us|ms|s)")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's figures, without latencies that no request has, or rates if none was served."""

    served: int  # answered in full
    failures: Mapping[str, int]  # reason → how often
    values: Mapping[str, float]  # by METRICS: seconds, and tokens per second
    lag_p99: float  # seconds by which the client sent late

    @property
    def client_late(self) -> bool:
        """Whether the client was too slow for its figures to describe the server."""
        return self.lag_p99 > _LAG_LIMIT * self.values.get("ttft_p50", math.inf)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What met the objectives, per second of the steady window."""

    share: float  # of the requests that began in it and did not leave, failed ones included
    requests_per_s: float  # that began in it
    tokens_per_s: float  # that arrived in it, as for all output tokens/s


def figures(run: Run) -> Figures:
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    stayed = [outcome for outcome in good if not outcome.left]
    steady = [outcome for outcome in stayed if _steady(run, outcome)]
    failures = Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)
    values = {
        f"{latency}_p{share}": float(value)
        for latency in LATENCIES
        if (found := samples(latency, steady))
        for share, value in zip(PERCENTILES, np.percentile(found, PERCENTILES), strict=True)
    }
    return Figures(
        served=len(stayed),
        failures=dict(failures.most_common()),
        values=values | _rates(run, good),
        lag_p99=percentile([o.sent - o.intended for o in run.outcomes], 99),
    )


def samples(latency: str, outcomes: Iterable[Outcome]) -> list[float]:
    """All values, in seconds, of one of LATENCIES in `outcomes`."""
    return [value for outcome in outcomes for value in _SAMPLES[latency](outcome)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent of `values` lie, interpolated; 0 without values."""
    return float(np.percentile(values, share)) if len(values) else 0.0


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=200ms,tpot=50ms` → seconds by latency. Raises ValueError."""
    objectives: dict[str, float] = {}
    for part in text.split(","):
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None or match["latency"] not in _ONCE_PER_REQUEST:
            names = ", ".join(_ONCE_PER_REQUEST)
            raise ValueError(
                f"{part!r} is no objective; write one such as ttft=200ms, of {names} in us, ms or s"
            )
        objectives[match["latency"]] = float(match["number"]) * _UNITS[match["unit"]]
    return objectives


def goodput(run: Run, objectives: Mapping[str, float]) -> Goodput | None:
    """What met all `objectives` (seconds by latency); None if the steady window is empty."""
    seconds = run.steady_to - run.steady_from
    asked = [o for o in run.outcomes if not o.left and _steady(run, o)]
    if seconds <= 0 or not asked:
        return None
    good = [o for o in run.outcomes if not o.left and o.error is None and _meets(o, objectives)]
    began = sum(_steady(run, outcome) for outcome in good)
    return Goodput(
        share=began / len(asked),
        requests_per_s=began / seconds,
        tokens_per_s=sum(_arrived(outcome, run) for outcome in good) / seconds,
    )


def _steady(run: Run, outcome: Outcome) -> bool:
    return run.steady_from <= outcome.intended <= run.steady_to


def _rates(run: Run, good: Sequence[Outcome]) -> dict[str, float]:
    seconds = run.steady_to - run.steady_from
    if seconds <= 0 or not good:
        return {}
    output = sum(_arrived(outcome, run) for outcome in good)
    prompt = sum(o.prompt_tokens for o in good if run.steady_from < _first(o) <= run.steady_to)
    return dict(zip(RATES, (output / seconds, (output + prompt) / seconds), strict=True))


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    return all(
        value <= limit
        for latency, limit in objectives.items()
        for value in _SAMPLES[latency](outcome)
    )


def _first(outcome: Outcome) -> float:
    """Time of the first text; for an answer without text (say, one special token), of its end."""
    return outcome.chunks[0][0] if outcome.chunks else outcome.ended


def _arrived(outcome: Outcome, run: Run) -> int:
    """Output tokens that arrived in the steady window; those without text count at the end."""
    arrived = before = 0
    for time, tokens in (*outcome.chunks, (outcome.ended, outcome.output_tokens)):
        if run.steady_from < time <= run.steady_to:
            arrived += max(0, tokens - before)
        before = max(before, tokens)
    return arrived


def _gaps(outcome: Outcome) -> list[float]:
    return [
        (time - before) / max(1, tokens - tokens_before)
        for (before, tokens_before), (time, tokens) in pairwise(outcome.chunks)
    ]


def _per_token(outcome: Outcome) -> list[float]:
    if outcome.output_tokens < 2:
        return []
    return [(outcome.ended - _first(outcome)) / (outcome.output_tokens - 1)]


_SAMPLES: Mapping[str, Callable[[Outcome], list[float]]] = {
    "ttft": lambda outcome: [_first(outcome) - outcome.intended],
    "ttft_from_wire": lambda outcome: [_first(outcome) - outcome.sent],
    "itl": _gaps,
    "tpot": _per_token,
    "e2e": lambda outcome: [outcome.ended - outcome.intended],
}
