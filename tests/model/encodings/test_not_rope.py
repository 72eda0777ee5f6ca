"""A common sample that calls itself RoPE, rebuilt from its description, against the properties.

It adds a table of positions to the embeddings and multiplies them by one fixed matrix of cosines.
Nothing in it turns by position, and every property of a rotary embedding fails on it.
"""

import math

import pytest
import torch

from tests.model.encodings import rope_properties
from tests.model.encodings.rope_properties import SPAN, WIDTH


class Sample:
    """Works on the residual stream [length, width], for one fixed length."""

    def __init__(self, width, length):
        self.matrix = torch.zeros(width, width, dtype=torch.float64)
        for i in range(width):
            for j in range(width):
                self.matrix[i, j] = math.cos(0.01 * i * j)
        self.table = torch.zeros(length, width, dtype=torch.float64)
        for position in range(length):
            for i in range(width):
                self.table[position, i] = math.sin(position / 10000 ** (i / width))

    def __call__(self, x):
        x += self.table
        x[:] = x @ self.matrix
        return x


SAMPLE = Sample(WIDTH, SPAN)


def kindly(x, positions):
    """The most generous reading: rows are put at their positions in a sequence of its length."""
    if len(x) == SPAN:
        return SAMPLE(x)
    results = []
    for row, position in zip(x, positions, strict=True):
        sequence = torch.zeros(SPAN, WIDTH, dtype=torch.float64)
        sequence[position] = row
        results.append(SAMPLE(sequence)[position])
    return torch.stack(results)


@pytest.mark.parametrize(
    "name",
    [
        "keeps_norms",
        "keeps_angles",
        "depends_on_distance_alone",
        "leaves_position_zero",
        "leaves_its_input",
    ],
)
def test_the_sample_is_not_rope(name):
    with pytest.raises(AssertionError):
        getattr(rope_properties, name)(kindly)


def test_the_sample_cannot_decode():
    """It has no position to give a token, and refuses any length but its own."""
    with pytest.raises(RuntimeError, match="shape"):
        rope_properties.decodes_one_at_a_time(lambda x, positions: SAMPLE(x))
