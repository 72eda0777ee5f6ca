"""Sinusoidal positions against the formula, one number at a time."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import EncodingError, create
from tests.model.tiny import CONFIG, CPU


def vectors(positions, *, width=10, context=3000, **options):
    config = replace(CONFIG, hidden_size=width)
    made = create(EncodingSpec("sinusoidal", options), config, context, CPU)
    return made.embed(torch.zeros(len(positions), width), torch.tensor(positions))


@pytest.mark.parametrize("layout", ["interleaved", "split"])
@pytest.mark.parametrize(("slowest", "last"), [("next", 5), ("last", 4)])
@pytest.mark.parametrize(("offset", "scale"), [(0, 1), (2, 0.5)])
def test_every_number_is_the_formula_s(layout, slowest, last, offset, scale):
    positions = [0, 1, 2, 77, 2999]
    found = vectors(positions, layout=layout, slowest=slowest, offset=offset, scale=scale)
    for row, position in zip(found, positions, strict=True):
        for i in range(5):
            angle = (position + offset) / 10000 ** (i / last)
            sine, cosine = (i, i + 5) if layout == "split" else (2 * i, 2 * i + 1)
            assert abs(row[sine] - scale * math.sin(angle)) < 1e-6
            assert abs(row[cosine] - scale * math.cos(angle)) < 1e-6


def test_an_odd_width_ends_with_a_zero():
    assert (vectors([0, 5], width=9, layout="split")[:, -1] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "halves"},
        {"layout": "split", "slowest": "first"},
        {"layout": "split", "offset": -1},
        {"layout": "split", "base": 500},
        {"layout": "split", "scale": 0},
        {"layout": "split", "scale": math.inf},
        {"layout": "split", "scale": "4"},
    ],
)
def test_options_that_do_not_fit(options):
    with pytest.raises(EncodingError, match="sinusoidal"):
        create(EncodingSpec("sinusoidal", options), CONFIG, 8, CPU)
