"""Which rotations kernels can do by tables."""

import math

import torch

from ropewalk.model.encodings.base import PositionalEncoding, inherits
from ropewalk.model.encodings.rope import RoPE


def tables_of(encoding: PositionalEncoding, head_dim: int) -> RoPE | None:
    """The encoding, if it rotates exactly as RoPE does, by tables that kernels can read."""
    if not isinstance(encoding, RoPE) or not inherits(encoding.rotate, encoding, RoPE.rotate):
        return None
    cos, sin = encoding.cos, encoding.sin
    fits = (
        cos.dtype is sin.dtype is torch.float32
        and cos.shape == sin.shape
        and cos.dim() == 2
        and len(cos) >= (encoding.max_positions or math.inf)
        and 2 * cos.shape[1] <= head_dim
    )
    return encoding if fits else None
