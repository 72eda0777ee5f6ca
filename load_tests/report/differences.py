"""Is one variant slower than another? Ratios with intervals that hold for few runs, and verdicts.

The machine's speed drifts between rounds, so runs are compared within a round. Rounds, not
requests, are resampled, because the tokens of one run are not independent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ropewalk.load_tests.common.statistics import RATES, Figures
from ropewalk.report.statistics import LEVEL, Estimate, Floats, mean_of_few

Verdict = Literal["slower", "faster", "no difference", "unknown"]

MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Difference(Estimate):
    """The ratio of one variant's figure to another's: 1.1: a tenth more. `unknown`: no figures."""

    p: float  # p-value: the probability of such a ratio if there is no difference
    verdict: Verdict
    reason: str = ""  # why the verdict is unknown


def paired(
    baseline: Mapping[int, Figures], variant: Mapping[int, Figures], metric: str
) -> Difference:
    """The ratio of `variant` to `baseline`, figures of one cell by round; interval uncorrected."""
    late = client_late((*baseline.values(), *variant.values()))
    return late or difference([log_ratios(baseline, variant, metric)], metric)


def difference(samples: Sequence[Floats], metric: str) -> Difference:
    """The ratio of variant to baseline from one sample of log(variant / baseline), a number for
    each round.

    Or, from two samples of logarithms that share no blocks, the ratio of the second to the first.
    """
    rounds = min(len(sample) for sample in samples)
    if rounds == 0:
        return unknown("no round has this figure")
    if rounds < MIN_ROUNDS:
        need = f"an interval needs {MIN_ROUNDS}: raise --runs"
        return unknown(f"{rounds} rounds have this figure, but {need}")
    log, p = mean_of_few(samples)
    verdict: Verdict = "no difference"
    if log.low > 0 or log.high < 0:
        verdict = "slower" if (log.value < 0) == (metric in RATES) else "faster"
    return Difference(math.exp(log.value), math.exp(log.low), math.exp(log.high), p, verdict)


def log_ratios(
    baseline: Mapping[int, Figures], variant: Mapping[int, Figures], metric: str
) -> Floats:
    """log(variant / baseline) of each round that has both."""
    both = [(variant[round].values, baseline[round].values) for round in variant.keys() & baseline]
    pairs = [(mine.get(metric), its.get(metric)) for mine, its in both]
    return np.array([math.log(mine / its) for mine, its in pairs if mine and its])


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Verdicts corrected for the number of `differences`; intervals stay uncorrected.

    Of many comparisons some stand out by chance. With Benjamini and Hochberg (1995), at most 5 %
    of the tables in which nothing differs show a difference, and otherwise at most 5 % of the
    differences shown are false on average. Other tables of the same result are not counted.
    """
    known = sorted(d.p for d in differences if d.verdict != "unknown")
    passing = [p for rank, p in enumerate(known, 1) if p <= LEVEL * rank / len(known)]
    limit = max(passing, default=-1.0)
    return [
        replace(d, verdict="no difference") if d.verdict != "unknown" and d.p > limit else d
        for d in differences
    ]


def unknown(reason: str) -> Difference:
    """No conclusion, and why."""
    return Difference(math.nan, math.nan, math.nan, math.nan, "unknown", reason)


def client_late(found: Sequence[Figures]) -> Difference | None:
    """An unknown difference if the client was too slow for a conclusion; else None."""
    if not any(one.client_late for one in found):
        return None
    return unknown("the client sent late (p99 above 5 % of the TTFT): lower the load")
