"""Means with intervals. Documents are resampled, not tokens, as tokens of a text are correlated."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
SEED = 0
NORMAL_95 = 1.959964  # standard deviations that contain 95 % of a normal distribution

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean or a share, and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(right: int, trials: int) -> Estimate:
    """A share of trials, with Wilson's score interval (Wilson 1927). At least one trial."""
    z2 = NORMAL_95**2
    share = right / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    half *= NORMAL_95
    return Estimate(share, max(middle - half, 0.0), min(middle + half, 1.0))


def by_document(means: Floats, weights: Floats) -> list[Estimate]:
    """The weighted mean of each column, with its percentile bootstrap interval over documents.

    means: [documents, columns], each document's own means; weights: [documents], the windows that
    each has. All columns share the same resamples, so differences of columns are paired. At least
    two documents.
    """
    count = len(weights)
    drawn = np.random.default_rng(SEED).multinomial(count, [1 / count] * count, size=RESAMPLES)
    shares = drawn * weights
    shares = shares / shares.sum(axis=1, keepdims=True)
    low, high = np.quantile(shares @ means, (0.025, 0.975), axis=0)
    middle = weights @ means / weights.sum()
    return [Estimate(*map(float, row)) for row in zip(middle, low, high, strict=True)]
