"""Sinusoidal absolute positions: a fixed vector of sines and cosines, added to the embedding.

The position is part of everything computed from the embedding, keys and values included, so no
stored entry can be moved to another position.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    MAX_POSITIONS,
    EncodingError,
    PositionalEncoding,
    PositionVectors,
    chunks,
    need_integer,
    need_scale,
    need_table,
)

LAYOUTS = ("interleaved", "split")
SLOWEST = ("next", "last")


def sinusoids(positions: int, width: int, layout: str, slowest: str) -> Tensor:
    """[positions, width] float32: sine and cosine of position / 10000^(i / n), for i < width / 2.

    n is width / 2 when the slowest frequency, 1/10000, would be that of the pair after the last
    (Vaswani et al., arXiv 1706.03762, section 3.5), or width / 2 - 1 when it is the last pair's
    (as in XGLM).
    """
    half = width // 2
    steps = half if slowest == "next" else half - 1
    frequencies = 10000.0 ** (torch.arange(half, dtype=torch.float64) / -steps)
    table = torch.zeros(positions, width)
    for rows in chunks(positions):
        angles = rows.double()[:, None] * frequencies
        if layout == "split":
            values = torch.cat((angles.sin(), angles.cos()), dim=1)
        else:
            values = torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)
        table[rows, : 2 * half] = values.float()
    return table


class Sinusoidal(PositionalEncoding):
    """Vaswani et al. (arXiv 1706.03762), section 3.5, tabulated for the served context."""

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "layout": "interleaved (sine and cosine alternate) or split (all sines, then all cosines)",
        "slowest": "which pair has the frequency 1/10000: the last one (last), or the one that "
        "would follow it (next); default next",
        "offset": "the number added to a position before its vector is looked up; default 0",
        "scale": "the factor by which every vector is multiplied; default 1",
    }
    LIMIT = "the served context: vectors are tabulated for its positions only"
    BEYOND_TRAINED = (
        "computes as before, but with vectors never seen in training; answers break down soon "
        "after the trained length"
    )

    WHY_FIXED = "the position is part of every stored key and value"

    def __init__(
        self,
        *,
        width: int,
        layout: str,
        slowest: str,
        offset: int,
        scale: float,
        context: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.max_positions = context
        # A plain attribute, so that it stays float32 when the model is cast.
        table = sinusoids(context + offset, width, layout, slowest)[offset:]
        self.table = table.mul_(scale).to(device)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options: OPTIONS above; layout is required."""
        if not {"layout"} <= options.keys() <= cls.OPTIONS.keys():
            raise EncodingError(
                "sinusoidal takes the option layout, and optionally slowest, offset and scale, "
                f"but got {sorted(options)}."
            )
        layout, slowest = options["layout"], options.get("slowest", "next")
        offset, scale = options.get("offset", 0), options.get("scale", 1.0)
        if layout not in LAYOUTS:
            raise EncodingError(
                f"sinusoidal's layout must be {' or '.join(LAYOUTS)}, but is {layout!r}."
            )
        if slowest not in SLOWEST:
            raise EncodingError(
                f"sinusoidal's slowest must be {' or '.join(SLOWEST)}, but is {slowest!r}."
            )
        need_integer("sinusoidal", "offset", offset, 0, MAX_POSITIONS)
        if config.hidden_size < 4:
            raise EncodingError(
                f"sinusoidal needs a width of at least 4, but got {config.hidden_size}."
            )
        need_table("sinusoidal", context + offset, config.hidden_size)
        need_scale("sinusoidal", scale)
        return cls(
            width=config.hidden_size,
            layout=layout,
            slowest=slowest,
            offset=offset,
            scale=scale,
            context=context,
            device=device,
        )

    @classmethod
    def usual_options(cls, config: ModelConfig) -> dict[str, Any]:
        return {"layout": "interleaved"}

    def fixed_tensors(self) -> dict[str, Tensor]:
        return {"table": self.table}

    def vectors(self) -> PositionVectors:
        return PositionVectors(self.table)
