"""Rotation of pairs of coordinates over several position axes: grids, and sections of a head.

Text has one axis, and `model/encodings/rope.py` serves it from tables. The forms here are those of
images and of Qwen2-VL's sections. Knows no models, batches or cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.encodings.common.rope_scaling import frequencies
from ropewalk.model.encodings.common.rotary import Layout, rotate_pairs


@dataclass(frozen=True, slots=True)
class MultiAxisRotation:
    """RoPE with several positions per token: every pair of coordinates follows one of them.

    If all positions of a token are equal, this is RoPE at that position.
    """

    frequencies: Tensor  # [pairs] float32, radians per step along the pair's axis
    axes: Tensor  # [pairs] int64, the axis of each pair
    layout: Layout
    magnitude: float = 1.0  # of the scaling that the frequencies were taken from

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, heads, head_dim], k [T, kv_heads, head_dim], positions [axes, T]."""
        angles = positions.float()[self.axes].t() * self.frequencies  # [T, pairs]
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return rotate_pairs(q, cos, sin, self.layout), rotate_pairs(k, cos, sin, self.layout)


def axial(base: float, width: int, *, axes: int = 2, layout: Layout = "half") -> MultiAxisRotation:
    """Each axis has its own block of pairs, with all frequencies of a head of width / axes.

    As in the vision towers of Qwen2-VL (arXiv 2409.12191, section 2.1; half) and of Llama 4
    (interleaved, with positions counted from 1). Raises EncodingError.
    """
    each = _pairs_per_axis(width, axes)
    return MultiAxisRotation(
        frequencies(base, 2 * each).repeat(axes),
        torch.arange(axes).repeat_interleave(each),
        layout,
    )


def dealt(base: float, width: int, *, axes: int = 2, layout: Layout = "half") -> MultiAxisRotation:
    """One head's frequencies are dealt to the axes in turn, then arranged in a block per axis.

    As in Pixtral's vision tower (arXiv 2410.07073, section 2). Raises EncodingError.
    """
    each = _pairs_per_axis(width, axes)
    return MultiAxisRotation(
        frequencies(base, width).view(each, axes).t().flatten(),
        torch.arange(axes).repeat_interleave(each),
        layout,
    )


def sectioned(
    speeds: Tensor,
    sections: Sequence[int],
    *,
    axes: int = 3,
    layout: Layout = "half",
    magnitude: float = 1.0,
) -> MultiAxisRotation:
    """One head's frequencies in consecutive sections: time, height, width, and then again.

    Qwen2-VL's multimodal rotation (arXiv 2409.12191, section 2.1; `mrope_section` in its
    config.json). `speeds`: [pairs]; `sections`: pairs in each. Raises EncodingError.
    """
    if sum(sections) != len(speeds) or min(sections, default=0) < 0:
        raise EncodingError(
            f"The sections {list(sections)} do not add up to the head's {len(speeds)} pairs."
        )
    owners = torch.arange(len(sections)) % axes
    return MultiAxisRotation(
        speeds, owners.repeat_interleave(torch.tensor(sections)), layout, magnitude
    )


def grid_positions(rows: int, columns: int) -> Tensor:
    """[2, rows · columns]: row and column of each cell, one row after the other."""
    row = torch.arange(rows).repeat_interleave(columns)
    return torch.stack((row, torch.arange(columns).repeat(rows)))


def _pairs_per_axis(width: int, axes: int) -> int:
    if width <= 0 or width % (2 * axes):
        raise EncodingError(f"{width} coordinates cannot form equally many pairs for {axes} axes.")
    return width // (2 * axes)
