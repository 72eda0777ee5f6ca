"""Counts of different numbers among neighbours, against counting by hand."""

import pytest
import torch

from ropewalk.model.encodings.base import KeyBias, LinearBias, TableBias
from ropewalk.model.inspect.explain.codes import (
    angle_codes,
    bias_codes,
    query_positions,
    vector_codes,
)
from ropewalk.model.inspect.explain.rotating import find_pair_rotation
from ropewalk.model.inspect.explain.subject import from_name, shape

CONFIG = shape(heads=4, head_dim=32, context=2048)


def test_positions_asked_at_are_ordered_and_end_where_they_should() -> None:
    assert query_positions(63) == [63]
    positions = query_positions(32767)
    assert positions == sorted(set(positions))
    assert positions[0] == 63 and positions[-1] == 32767
    assert {127, 1023, 4095, 16383} <= set(positions)


def test_angles_in_bf16_lose_neighbours_as_measured() -> None:
    subject = from_name("rope", CONFIG, {})
    found = find_pair_rotation(subject.encoding, CONFIG, 2048)
    at = [127, 1023, 1024, 4096, 32768, 100_000]
    codes = angle_codes(found, at)
    assert codes["fp32"] == [64] * 6
    assert codes["bf16"] == [64, 17, 17, 5, 1, 1]
    assert codes["fp16"][:4] == [64, 64, 64, 33]
    assert codes["fp16"][-1] == 1  # past 65,504 all are infinite


def test_slope_by_key_rounds_where_slope_by_distance_does_not() -> None:
    codes = bias_codes(LinearBias(torch.tensor([0.5, 0.25])), [255, 1023, 4095])
    assert all(codes[name] == [64] * 3 for name in ("bf16", "fp16", "fp32", "by key, fp32"))
    assert codes["by key, bf16"] == [64, 17, 5]
    assert codes["by key, fp16"] == [64, 64, 33]


def test_the_head_with_the_fewest_counts() -> None:
    table = torch.stack((torch.arange(70.0), torch.arange(70).clamp(max=9).float()))
    assert bias_codes(TableBias(table), [63, 500]) == {
        "bf16": [10, 10],
        "fp16": [10, 10],
        "fp32": [10, 10],
    }


def test_a_bias_by_key_is_counted_where_the_query_stands() -> None:
    table = torch.zeros(1, 200)
    table[0, :100] = torch.arange(100.0)
    assert bias_codes(KeyBias(table), [63, 131, 199])["fp32"] == [64, 33, 1]


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_vectors_of_different_positions_stay_different(name) -> None:
    subject = from_name("sinusoidal", CONFIG, {})
    assert vector_codes(subject.whole, CONFIG.hidden_size, [63, 2047])[name] == [64, 64]
