"""How pairs turn is found from the hook alone; scores by distance are those of turned vectors."""

import math

import pytest
import torch

from ropewalk.model.encodings.base import PositionalEncoding, find
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.inspect.explain.rotating import (
    bound,
    envelope,
    equal_vectors,
    find_pair_rotation,
    random_scores,
)
from ropewalk.model.inspect.explain.subject import from_name, shape

CONFIG = shape(heads=3, head_dim=16, context=600)


def rope(config=CONFIG, **options):
    return from_name("rope", config, options).encoding


def found(config=CONFIG, **options):
    return find_pair_rotation(rope(config, **options), config, config.trained_context)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, [(i, i + 8) for i in range(8)]),
        ({"layout": "interleaved"}, [(2 * i, 2 * i + 1) for i in range(8)]),
        ({"width": 6}, [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_pairs_and_speeds_are_those_of_the_encoding(options, pairs) -> None:
    turns = found(**options)
    width = options.get("width", 16)
    assert list(turns.pairs) == pairs
    expected = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    assert torch.allclose(turns.speeds, expected, rtol=1e-6)
    assert turns.still == 16 - width
    assert turns.magnitude == pytest.approx(1, abs=1e-6)


def test_magnitude_and_stretched_speeds_are_seen() -> None:
    turns = found(scaling={"type": "yarn", "factor": 4.0, "original_context": 150})
    assert turns.magnitude == pytest.approx(0.1 * math.log(4) + 1, rel=1e-5)
    assert float(turns.speeds[-1]) == pytest.approx(10000 ** (-14 / 16) / 4, rel=1e-5)


def test_pairs_that_stand_still_are_counted_so() -> None:
    turns = found(scaling={"type": "proportional", "share": 0.5})
    assert (len(turns.pairs), turns.still) == (4, 8)


@pytest.mark.parametrize("storage", ["raw", "block"])
def test_how_keys_are_stored_changes_neither_pairs_nor_speeds(storage) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context": 150}
    turns, plain = found(storage=storage, scaling=scaling), found(scaling=scaling)
    assert turns.pairs == plain.pairs and turns.still == plain.still
    assert torch.allclose(turns.speeds, plain.speeds, rtol=1e-6)
    assert turns.magnitude == pytest.approx(plain.magnitude)


class Jumping(RoPE):
    """Turns by twice the angle at position 7 and further."""

    def rotate(self, q, k, positions, offsets):
        return super().rotate(q, k, torch.where(positions < 7, positions, 2 * positions), offsets)


class OneSided(RoPE):
    """Forgets the keys."""

    def rotate(self, q, k, positions, offsets):
        return super().rotate(q, k, positions, offsets)[0], k


class Uneven(RoPE):
    """Turns the last head by twice the angle."""

    def rotate(self, q, k, positions, offsets):
        once, twice = (super(Uneven, self).rotate(q, k, n * positions, offsets) for n in (1, 2))
        return tuple(torch.cat((a[:, :-1], b[:, -1:]), 1) for a, b in zip(once, twice, strict=True))


class Mixing(PositionalEncoding):
    """Shifts coordinates, which no pairs explain."""

    def rotate(self, q, k, positions, offsets):
        return q.roll(1, -1) * 1.0, k.roll(1, -1) * 1.0


@pytest.mark.parametrize("kind", [Jumping, OneSided, Uneven])
def test_what_no_fixed_speed_explains_is_not_called_turning(kind) -> None:
    encoding = kind.create(find("rope").usual_options(CONFIG), CONFIG, 1200, torch.device("cpu"))
    assert find_pair_rotation(encoding, CONFIG, 600) is None


def test_other_changes_are_not_called_turning() -> None:
    assert find_pair_rotation(Mixing(), CONFIG, 600) is None
    assert find_pair_rotation(PositionalEncoding(), CONFIG, 600) is None


def turned(encoding, q, k, distances):
    """q · k with the query at the last distance, the key so far before it: through the hook."""
    last = int(distances[-1])
    heads = CONFIG.num_heads
    rows = torch.arange(last + 1)
    query, _ = encoding.rotate(
        q.float().repeat(1, heads, 1), k.float().repeat(1, heads, 1), torch.tensor([last]), rows[:1]
    )
    _, keys = encoding.rotate(
        q.float().repeat(last + 1, heads, 1), k.float().repeat(last + 1, heads, 1), rows, rows
    )
    return (keys[:, 0].double() @ query[0, 0].double()).flip(0)[distances]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"width": 10, "layout": "interleaved"},
        {"scaling": {"type": "yarn", "factor": 4.0, "original_context": 150}},
    ],
)
def test_scores_are_those_of_vectors_that_were_really_turned(options) -> None:
    distances = torch.arange(500)
    turns = found(**options)
    encoding = rope(**options)
    ones = torch.ones(16)
    expected = turned(encoding, ones, ones, distances) / 16
    assert (equal_vectors(turns, 16, distances) - expected).abs().max() < 1e-4

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
    scores = random_scores(turns, 16, distances, 5)
    for i in range(5):
        expected = turned(encoding, q[i], k[i], distances) / 4
        assert (scores[i] - expected).abs().max() < 1e-3


def test_figures_of_a_head_of_128() -> None:
    """What the literature's picture really shows: decay on the whole, with half the steps up."""
    config = shape(heads=1, head_dim=128, context=1101)
    turns = found(config)
    distances = torch.arange(1025)
    score = 128 * equal_vectors(turns, 128, distances)
    assert [round(float(score[at])) for at in (0, 10, 100, 1000)] == [128, 86, 61, 20]
    assert 0.45 < float((score[1:] > score[:-1]).double().mean()) < 0.51
    above = envelope(score)
    assert bool((above >= score.abs()).all() and (above[1:] <= above[:-1]).all())
    factor = bound(turns, distances)
    assert float(factor[0]) == pytest.approx(32.5)  # the mean of 1 .. 64
    assert float(factor[1000]) < float(factor[0]) / 5
    drawn = random_scores(turns, 128, distances[:1024], 2000)
    assert 0.03 < float((drawn.argmax(dim=1) < 32).double().mean()) < 0.07
    assert float(drawn.std()) == pytest.approx(1, abs=0.05)
