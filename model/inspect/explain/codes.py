"""Counts distinct angles, biases and vectors of the nearest 64 positions in each number format.

Positions with equal values cannot be distinguished by them. Only counts, no pictures.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ropewalk.model.encodings.base import LinearBias, PositionalEncoding, ScoreBias
from ropewalk.model.inspect.explain.rotating import PairRotation

NEAREST = 64
FORMATS: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
Series = dict[str, list[int]]  # label: count at each query position


def query_positions(last: int) -> list[int]:
    """Query positions: about powers of √2 from 63 and 127 on, and always the last."""
    found = {NEAREST - 1, last}
    at = float(2 * NEAREST)
    while at <= last:
        found.add(int(at) - 1)
        at *= math.sqrt(2)
    return sorted(position for position in found if position <= last)


def angle_codes(found: PairRotation, positions: list[int]) -> Series:
    """Over all pairs together, with position, frequency and product in one format."""

    def codes(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        speeds = found.speeds.to(dtype)
        return lambda keys: (keys.to(dtype)[:, None] * speeds).float().nan_to_num(posinf=1e38)

    return {
        name: [_distinct(codes(dtype)(_nearest(at))) for at in positions]
        for name, dtype in FORMATS.items()
    }


def bias_codes(bias: ScoreBias, positions: list[int]) -> Series:
    """For the head with the fewest, when the served bias is stored in each format.

    For a linear bias also with slope · key position instead of slope · distance, an equivalent
    form under softmax.
    """
    series: Series = {}
    for name, dtype in FORMATS.items():
        series[name] = [
            _fewest(bias.between(torch.tensor([at]), _nearest(at))[:, 0].to(dtype))
            for at in positions
        ]
        if isinstance(bias, LinearBias):
            slopes = bias.slopes.to(dtype)[:, None]
            series[f"by key, {name}"] = [
                _fewest(slopes * _nearest(at).to(dtype)) for at in positions
            ]
    return series


def vector_codes(whole: PositionalEncoding, width: int, positions: list[int]) -> Series:
    """For the vectors that are added to the embeddings, rounded to each format."""

    def vectors(at: int) -> Tensor:
        return whole.embed(torch.zeros(NEAREST, width), _nearest(at))

    return {
        name: [_distinct(vectors(at).to(dtype).float()) for at in positions]
        for name, dtype in FORMATS.items()
    }


def _nearest(at: int) -> Tensor:
    """[64]: a query's own position and those before it."""
    return torch.arange(at - NEAREST + 1, at + 1)


def _distinct(rows: Tensor) -> int:
    return len(torch.unique(rows, dim=0))


def _fewest(values: Tensor) -> int:
    """values: [heads, 64]."""
    return min(len(torch.unique(head.float())) for head in values)
