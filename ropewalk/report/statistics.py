"""An estimate with its interval, in every way that is needed here, and what each way is for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

LEVEL = 0.05  # significance: intervals are 95 %
MIN_VALUES = 6  # fewest with which the range of all holds the true median in 95 % of cases
RESAMPLES = 2000
SEED = 0
NORMAL_95 = 1.959964  # standard deviations that contain 95 % of a normal distribution

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, mean, ratio or share, and its interval or range."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def drawable(self) -> "Estimate":
        """Without an interval, if it is infinite."""
        known = math.isfinite(self.low) and math.isfinite(self.high)
        return self if known else Estimate(self.value, self.value, self.value)


def spread(values: Sequence[float]) -> Estimate | None:
    """Median and range, which concludes nothing; None without values."""
    return Estimate(median(values), min(values), max(values)) if values else None


def median_of(values: Sequence[float]) -> Estimate:
    """The median, with an interval between two of the values, whatever their distribution.

    The number of values below the true median is binomial, as the heads of coins are, which gives
    the two (Conover, "Practical Nonparametric Statistics", section 3.2). With fewer than
    MIN_VALUES no two suffice, and the interval is infinite.
    """
    ordered, count = sorted(values), len(values)
    middle = median(ordered)
    if count < MIN_VALUES:
        return Estimate(middle, -math.inf, math.inf)
    outside, missed = 0, 2 / 2**count  # values left out at each end; how often that is wrong
    while (missed := missed + 2 * math.comb(count, outside + 1) / 2**count) <= LEVEL:
        outside += 1
    return Estimate(middle, ordered[outside], ordered[-1 - outside])


def wilson(right: int, trials: int) -> Estimate:
    """A share of trials, with Wilson's score interval (Wilson 1927). At least one trial."""
    z2 = NORMAL_95**2
    share = right / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    half *= NORMAL_95
    return Estimate(share, max(middle - half, 0.0), min(middle + half, 1.0))


def by_document(means: Floats, weights: Floats) -> list[Estimate]:
    """The weighted mean of each column, with its percentile bootstrap interval over documents.

    Documents are resampled, not tokens, as tokens of a text are correlated. means: [documents,
    columns], each document's own means; weights: [documents], the windows that each has. All
    columns share the same resamples, so differences of columns are paired. At least two documents.

    With few documents, or few that have most of the windows, the interval is too narrow: of the
    family's held-out texts, where one novel has a third of all windows and 24 documents count as
    7.2 of one size, it held the true mean in nine of ten simulated cases.
    """
    count = len(weights)
    drawn = np.random.default_rng(SEED).multinomial(count, [1 / count] * count, size=RESAMPLES)
    shares = drawn * weights
    shares = shares / shares.sum(axis=1, keepdims=True)
    low, high = np.quantile(shares @ means, (LEVEL / 2, 1 - LEVEL / 2), axis=0)
    middle = weights @ means / weights.sum()
    return [Estimate(*map(float, row)) for row in zip(middle, low, high, strict=True)]


def mean_of_few(samples: Sequence[Floats]) -> tuple[Estimate, float]:
    """The mean of one sample of 3 to 10 values, or how much more that of the second of two is.

    And a p-value: the probability of such a mean if the true one is 0.

    For so few values the usual percentile bootstrap is too narrow. This one is studentised, which
    accounts for the unknown variance, and smoothed with a normal kernel of width s/√n, which
    restores the variance that resampling shrinks to (n−1)/n (Hesterberg, "What Teachers Should
    Know About the Bootstrap", 2015).
    """
    mean = float(samples[-1].mean() - (samples[0].mean() if len(samples) > 1 else 0.0))
    error = math.sqrt(sum(sample.var(ddof=1) / len(sample) for sample in samples))
    error = max(error, 1e-9)  # equal values show a clock's resolution, not certainty
    replicates = np.sort(_studentised(samples))
    reach = error * float(np.quantile(replicates, 1 - LEVEL))
    above = RESAMPLES - int(np.searchsorted(replicates, abs(mean) / error))
    return Estimate(mean, mean - reach, mean + reach), (1 + above) / (1 + RESAMPLES)


def _studentised(samples: Sequence[Floats]) -> Floats:
    """|t| of replicates drawn under the null hypothesis, [replicates]."""
    source = np.random.default_rng(SEED)
    mean = np.zeros(RESAMPLES)
    variance = np.zeros(RESAMPLES)
    for sample in samples:
        n = len(sample)
        kernel = max(sample.std(ddof=1), 1e-9) / math.sqrt(n)
        drawn = source.choice(sample - sample.mean(), (RESAMPLES, n))
        drawn = drawn + kernel * source.standard_normal((RESAMPLES, n))
        mean += drawn.mean(1)
        variance += drawn.var(1, ddof=1) / n
    return np.asarray(np.abs(mean) / np.sqrt(variance))
