"""Intervals: known cases, and that they cover what they promise."""

import numpy as np
import pytest

from ropewalk.report.statistics import by_document, wilson


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [
        (0, 50, 0.0, 0.0713),
        (50, 50, 0.9287, 1.0),
        (25, 50, 0.3664, 0.6336),
        (1, 10, 0.0179, 0.4042),
    ],
)
def test_wilson_has_its_published_values(right, trials, low, high) -> None:
    found = wilson(right, trials)
    assert found.value == right / trials
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_a_mean_over_documents_is_weighted_and_its_interval_covers_the_truth() -> None:
    weights = np.array([1.0, 3.0])
    (only,) = by_document(np.array([[2.0], [4.0]]), weights)
    assert only.value == 3.5 and (only.low, only.high) == (2.0, 4.0)

    drawn = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        means = drawn.normal(5.0, 1.0, (25, 1))
        (found,) = by_document(means, np.ones(25))
        covered += found.low <= 5.0 <= found.high
    assert 86 <= covered <= 99  # 95 are promised; a bootstrap of 25 gives a little less


def test_draws_keep_the_weights_of_their_documents() -> None:
    means = np.repeat([[0.0], [1.0]], 20, axis=0)
    (found,) = by_document(means, np.repeat([1.0, 9.0], 20))
    assert found.value == pytest.approx(0.9) and 0.8 < found.low < found.high < 0.96


def test_columns_see_the_same_draws() -> None:
    means = np.random.default_rng(0).normal(size=(9, 1))
    first, second, difference = by_document(
        np.hstack([means, means + 1, means - (means + 1)]), np.ones(9)
    )
    assert second.low == pytest.approx(first.low + 1)
    assert difference.low == pytest.approx(-1) and difference.high == pytest.approx(-1)
