"""Learned absolute positions: one trained vector for each position, added to the embedding.

The position is part of everything computed from the embedding, keys and values included, so no
stored entry can be moved to another position.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    MAX_POSITIONS,
    EncodingError,
    PositionalEncoding,
    PositionVectors,
    need_integer,
    need_scale,
)


class Learned(PositionalEncoding):
    """Gehring et al. (arXiv 1705.03122), section 3.1; GPT-2 and OPT."""

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "positions": "how many positions were trained",
        "offset": "how many rows the table has before that of position 0: 2 in OPT, 0 in GPT-2",
        "scale": "the factor by which every vector is multiplied; default 1",
    }
    LIMIT = "the trained positions: the table has no row for any other"
    BEYOND_TRAINED = "refuses: there is no vector for such a position"

    WHY_FIXED = "the position is part of every stored key and value"

    def __init__(
        self, *, positions: int, offset: int, scale: float, width: int, device: torch.device
    ) -> None:
        super().__init__()
        self.max_positions = positions
        self.offset = offset
        self.scale = scale
        # float32 whatever the model's dtype; only the sum is rounded to it.
        self.table = nn.Parameter(
            torch.empty(positions + offset, width, dtype=torch.float32, device=device),
            requires_grad=False,
        )

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options: OPTIONS above; positions and offset are required."""
        if not {"positions", "offset"} <= options.keys() <= cls.OPTIONS.keys():
            raise EncodingError(
                "learned takes the options positions and offset, and optionally scale, "
                f"but got {sorted(options)}."
            )
        positions, offset = options["positions"], options["offset"]
        scale = options.get("scale", 1.0)
        need_integer("learned", "positions", positions, 0, MAX_POSITIONS)
        need_integer("learned", "offset", offset, 0, MAX_POSITIONS)
        if positions < 1:
            raise EncodingError("learned needs 1 position or more, but got 0.")
        need_scale("learned", scale)
        return cls(
            positions=positions, offset=offset, scale=scale, width=config.hidden_size, device=device
        )

    @classmethod
    def usual_options(cls, config: ModelConfig) -> dict[str, Any]:
        return {"positions": config.trained_context, "offset": 0}

    def vectors(self) -> PositionVectors:
        return PositionVectors(self.table[self.offset :], self.scale)
