"""Rotation of pairs of coordinates, and the part that attention applies to stored keys.

Knows no encodings, models, batches or cache.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ropewalk.cache.types import KeyStorage

# Which coordinates of a head form a pair: i with i + width/2, or 2i with 2i + 1.
Layout = Literal["half", "interleaved"]
Side = tuple[Tensor, Tensor]  # queries and keys, to be multiplied


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """x [T, heads, head_dim]; cos and sin [T, pairs] → x with 2 · pairs coordinates rotated.

    Products are computed in the wider of both dtypes and rounded once; x itself is unchanged.
    """
    width = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotating, rest = x[..., :width], x[..., width:]
    if layout == "half":
        a, b = rotating.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = rotating[..., 0::2], rotating[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


@dataclass(frozen=True, slots=True)
class Far:
    """Other angles, for scores of keys that are `start` positions or more before the query.

    They are those of other positions, which are rows of the same tables: [positions] int64 each.
    """

    start: int
    queries: Tensor  # for a query at each position
    keys: Tensor

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., Q] and [..., K] → whether the key is far, [..., Q, K]."""
        return queries[..., :, None] - keys[..., None, :] >= self.start


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation left to an attention backend: of queries, and of stored keys.

    A query at position m and a key at position base + offset must be scored as if both were
    rotated by their positions. A raw key is rotated by its position. A key in block storage was
    rotated by its offset when it was stored, so its block's base is what is left; or instead the
    query is rotated, once per block, by m - base: R(m - base)ᵀ R(offset) = R(m)ᵀ R(base + offset).
    Only raw keys can have a second angle, where they are far from a query.
    """

    cos: Tensor  # [positions, pairs] float32; in raw storage times a scaling's magnitude
    sin: Tensor
    layout: Layout
    storage: KeyStorage  # RAW or BLOCK
    magnitude: float = 1.0  # further factor on the rotated coordinates of queries
    far: Far | None = None

    def queries(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [T, heads, head_dim] rotated by positions [T]."""
        cos, sin = self.cos[positions] * self.magnitude, self.sin[positions] * self.magnitude
        return rotate_pairs(q, cos, sin, self.layout)

    def keys(self, keys: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        """Stored keys [T, kv_heads, head_dim], at positions and block offsets [T] → rotated keys.

        Slots that hold no token may have any position: their rotation is meaningless.
        """
        lacking = positions if self.storage is KeyStorage.RAW else positions - offsets
        lacking = lacking.clamp(0, len(self.cos) - 1)
        return rotate_pairs(keys, self.cos[lacking], self.sin[lacking], self.layout)

    def sides(
        self, q: Tensor, keys: Tensor, positions: Tensor, key_positions: Tensor, offsets: Tensor
    ) -> tuple[Side, Side | None]:
        """Rotated queries and keys: as near keys are scored, and as far ones are if there are any.

        Arguments as for `queries` and `keys`.
        """
        near = self.queries(q, positions), self.keys(keys, key_positions, offsets)
        if self.far is None:
            return near, None
        of_keys = self.far.keys[key_positions.clamp(0, len(self.far.keys) - 1)]
        of_queries = self.far.queries[positions]
        return near, (self.queries(q, of_queries), self.keys(keys, of_keys, offsets))
