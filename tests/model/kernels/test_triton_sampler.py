"""Draws where the most likely tokens do not hold all that is kept; interpreted without a GPU."""

import math

import pytest
import torch

from ropewalk.model.kernels.triton import launches
from ropewalk.model.sampler import Sampler
from ropewalk.model.sampling import Ask, SamplingParams
from tests.model.attention.triton_here import DEVICE
from tests.model.test_sampler import kept
from tests.products import combined

pytestmark = pytest.mark.triton


@pytest.fixture
def sampler(monkeypatch):
    """Few candidates, so that most rows need more."""
    monkeypatch.setattr(launches, "CANDIDATES", 2)
    return launches.TritonSampler()


def params(temperature, top_p, min_p, top_k=0):
    return SamplingParams(
        max_tokens=8, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k
    )


def picked(sampler, rows, asks):
    return [each.token for each in sampler.pick(rows, asks)]


def uniforms(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


TRUNCATIONS = [
    (1.0, 0.9, 0.0),
    (0.3, 0.95, 0.0),
    (2.0, 0.999, 0.0),
    (1.0, 1.0, 0.05),
    (1.0, 0.9, 0.2),
    (1.0, 0.5, 0.001),
    (1.0, 1e-6, 0.0),
    (1.0, 0.4, 1.0),
]


# Those that a tile does not hold, and those that it does, of weights that differ and hardly do.
@pytest.mark.parametrize(
    ("vocab", "spread"),
    combined(
        [7, 900, 2048, 3001],
        [3.0, 0.01],
        always=lambda vocab, spread: vocab == 3001 or (spread < 1) == (vocab == 900),
    ),
)
def test_what_is_drawn_is_what_a_sort_draws(vocab, spread, sampler):
    """Rows of one call have rules of their own; some need nobody's help."""
    rows = torch.randn(10, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    rules = [*TRUNCATIONS, (1.0, 0.9, 0.0, 5), (1.0, 1.0, 0.0)]
    asks = [
        Ask(params(*rule), [], 0, uniform)
        for rule, uniform in zip(rules, uniforms(10, vocab), strict=True)
    ]
    found = picked(sampler, rows.to(DEVICE), asks)
    assert found == Sampler().begin(rows, asks).tokens.tolist()
    assert found == picked(Sampler(), rows, asks)


def test_of_equal_tokens_the_first_are_kept(sampler):
    """At the end of what is kept, and where all are equal."""
    row = torch.zeros(10)
    row[[3, 7]] = 3.0
    steps = [0.0, *((n + 0.5) / 10 for n in range(10)), 1 - 2**-53]
    for given, top_p in ((torch.zeros(10), 0.75), (row, 0.95), (row, 0.9)):
        asks = [Ask(params(1.0, top_p, 0.0), [], 0, uniform) for uniform in steps]
        found = picked(sampler, given.expand(len(asks), -1).to(DEVICE), asks)
        for token, due in kept(given, 1.0, 0, top_p, 0.0).items():
            assert abs(found.count(token) - 10 * due) <= 2


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_impossible_tokens_are_never_drawn(uniform, sampler):
    row = torch.zeros(3000)
    row[::2] = -math.inf
    row[2100:] = -math.inf
    for *rule, count in ((1.0, 0.9999, 0.0, 1050), (1e-5, 0.9, 0.0, 945), (1.0, 1.0, 1e-3, 1050)):
        (token,) = picked(sampler, row[None].to(DEVICE), [Ask(params(*rule), [], 0, uniform)])
        assert token == 1 + 2 * min(int(uniform * count), count - 1)  # of two tiles


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, which interprets
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_no_numbers_does_no_harm(value, sampler):
    rows = torch.arange(100.0).view(2, 50) / 10
    rows[0] = value
    asks = [Ask(params(1.0, 0.9, 0.0), [], 0, 0.5)] * 2
    broken, whole = sampler.pick(rows.to(DEVICE), asks)
    assert not broken.finite and 0 <= broken.token < 50
    assert whole.finite and whole.token == picked(Sampler(), rows[1:], asks[1:])[0]
