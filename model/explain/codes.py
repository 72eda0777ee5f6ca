"""How many different numbers the nearest 64 positions have in each format: angles, biases, vectors.

Two positions that share a number cannot be told apart by it. Numbers only, no pictures.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model.encodings.base import LinearBias, PositionalEncoding, ScoreBias
from model.explain.turning import Turning

NEAREST = 64
FORMATS: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
Series = dict[str, list[int]]  # label: how many at each query position


def query_positions(last: int) -> list[int]:
    """Positions to ask at: powers of two and between, from 63 or 127 on, the last included."""
    found = {NEAREST - 1, last}
    at = float(2 * NEAREST)
    while at <= last:
        found.add(int(at) - 1)
        at *= math.sqrt(2)
    return sorted(position for position in found if position <= last)


def angle_codes(found: Turning, positions: list[int]) -> Series:
    """Of all pairs together, when position, speed and product are in one format."""

    def codes(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        speeds = found.speeds.to(dtype)
        return lambda keys: (keys.to(dtype)[:, None] * speeds).float().nan_to_num(posinf=1e38)

    return {
        name: [_distinct(codes(dtype)(_nearest(at))) for at in positions]
        for name, dtype in FORMATS.items()
    }


def bias_codes(bias: ScoreBias, positions: list[int]) -> Series:
    """Of the head with the fewest, when the bias as it is served is stored in each format.

    For a linear bias also with slope · key position in place of slope · distance, the other form
    that softmax cannot tell from it.
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
    """Of the vectors that are added to the embeddings, rounded to each format."""

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
