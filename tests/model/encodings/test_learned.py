"""Learned positions: one row for each, none for any other."""

import pytest
import torch

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import EncodingError, create
from tests.model.tiny import CONFIG, CPU

WIDTH = CONFIG.hidden_size


def learned(**options):
    made = create(EncodingSpec("learned", options), CONFIG, 8, CPU)
    rows = torch.arange(len(made.table), dtype=torch.float32)
    made.table.copy_(rows[:, None].expand(-1, WIDTH))
    return made


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("scale", [1, 0.5, 32.0])
def test_a_position_adds_its_row(offset, scale):
    made = learned(positions=8, offset=offset, scale=scale)
    x = torch.ones(3, WIDTH)
    y = made.embed(x, torch.tensor([0, 7, 3]))
    assert y[:, 0].tolist() == [1 + scale * (row + offset) for row in (0, 7, 3)]
    assert (y == y[:, :1]).all()
    assert (x == 1).all()  # the input is left alone


def test_there_is_no_row_past_the_table():
    made = learned(positions=8, offset=2)
    assert made.max_positions == 8
    with pytest.raises(IndexError):
        made.embed(torch.ones(1, WIDTH), torch.tensor([8]))


def test_the_table_stays_float32_and_the_sum_is_rounded_once():
    made = learned(positions=300, offset=0)
    x = torch.full((1, WIDTH), 0.5, dtype=torch.bfloat16)
    y = made.embed(x, torch.tensor([257]))
    assert y.dtype is torch.bfloat16
    assert y[0, 0] == torch.tensor(257.5).bfloat16()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": 8},
        {"positions": 0, "offset": 0},
        {"positions": 8, "offset": -1},
        {"positions": 8, "scale": 2},
        {"positions": 8, "offset": 0, "scale": 0},
        {"positions": 8, "offset": 0, "scale": "32"},
        {"positions": 8, "offset": 0, "width": 2},
    ],
)
def test_options_that_do_not_fit(options):
    with pytest.raises(EncodingError, match="learned"):
        create(EncodingSpec("learned", options), CONFIG, 8, CPU)


def test_work_does_not_grow_with_the_context():
    made = learned(positions=8, offset=0)
    assert made.work(CONFIG, 1, 16) == made.work(CONFIG, 100_000, 16)
    assert made.work(CONFIG, 1, 16).flops == WIDTH
