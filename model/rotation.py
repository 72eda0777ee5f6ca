"""Turning pairs of coordinates, and what is still to be turned when keys are stored unturned.

Knows no encoding, model, batch or cache.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cache.terms import KeyFrame

# Which coordinates of a head turn together: i with i + width/2, or 2i with 2i + 1.
Layout = Literal["half", "interleaved"]


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """x [T, heads, head_dim]; cos and sin [T, pairs] → the first 2 · pairs coordinates turned.

    The products are in the wider of both dtypes and rounded once; x is left as it was.
    """
    width = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turning, rest = x[..., :width], x[..., width:]
    if layout == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@dataclass(frozen=True, slots=True)
class Rotation:
    """What an attention backend must still turn: queries that come unturned, and stored keys.

    A query at position m and a key at position base + offset must meet as if both were turned at
    their positions. A raw key is turned at its position. A key of the block frame was turned by
    its offset when it was stored, so it is turned by its block's base; or instead the query, once
    for each block, by m - base: R(m - base)ᵀ R(offset) = R(m)ᵀ R(base + offset).
    """

    cos: Tensor  # [positions, pairs] float32; in the raw frame times the magnitude of a scaling
    sin: Tensor
    layout: Layout
    frame: KeyFrame  # RAW or BLOCK
    magnitude: float = 1.0  # what the turning coordinates of queries are multiplied by besides

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [T, heads, head_dim] turned at positions [T]."""
        cos, sin = self.cos[positions] * self.magnitude, self.sin[positions] * self.magnitude
        return turn(q, cos, sin, self.layout)

    def keys(self, keys: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        """Stored keys [T, kv_heads, head_dim], at positions and block offsets [T] → turned.

        Slots that hold no token may have any position: they are turned by some angle.
        """
        lacking = positions if self.frame is KeyFrame.RAW else positions - offsets
        lacking = lacking.clamp(0, len(self.cos) - 1)
        return turn(keys, self.cos[lacking], self.sin[lacking], self.layout)
