"""CoPE: a key's position is how many tokens from there to the query the query counts.

The count is of what the query attends to, a fraction of a token for each key, so that "three
sentences ago" can be a position. It is made anew for each query, and nothing of it is stored.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    MAX_POSITIONS,
    EncodingError,
    PositionalEncoding,
    Scored,
    need_integer,
    need_table,
)
from ropewalk.model.encodings.common.cost import PositionalWork

COUNTED = 64  # positions, where a config does not say


class CoPE(PositionalEncoding):
    """Golovneva et al. (arXiv 2405.18719), as the paper's listing has it.

    Key j counts sigmoid(score of j); its position p is the sum over j .. query, at most the last.
    Added is q · e[p], between two vectors linearly interpolated. The authors' code usually divides
    that by the root of head_dim.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "positions": f"how many have a vector; farther keys share the last; default {COUNTED}"
    }
    BEYOND_TRAINED = "computes as before; keys beyond the last counted position are alike"

    def __init__(self, positions: int, width: int, device: torch.device, layers: int = 0) -> None:
        """One layer's vectors, or those of so many layers; `width` is that of a head."""
        super().__init__()
        self.layers = nn.ModuleList(CoPE(positions, width, device) for _ in range(layers))
        if layers:
            return
        # float32 whatever the model's dtype, as scores are.
        vectors = torch.empty((positions, width), dtype=torch.float32, device=device)
        self.vector = nn.Parameter(vectors, requires_grad=False)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options as in OPTIONS."""
        if not options.keys() <= cls.OPTIONS.keys():
            raise EncodingError(f"cope takes positions, but got {sorted(options)}.")
        positions = options.get("positions", COUNTED)
        need_integer("cope", "positions", positions, 2, MAX_POSITIONS)
        need_table("cope", positions, config.head_dim)
        return cls(positions, config.head_dim, device, config.num_layers)

    def content_bias(self, seen: Scored) -> Tensor | None:
        """None of all layers together: see `for_layer`."""
        if self.layers:
            return None
        counted = seen.scores.sigmoid().flip(-1).cumsum(dim=-1).flip(-1)
        counted = counted.clamp(max=len(self.vector) - 1)
        at = counted.detach().nan_to_num()  # an index even where a fault has made it NaN
        products = seen.q.to(seen.scores.dtype) @ self.vector.to(seen.scores.dtype).T
        below, above = (products.gather(-1, each.long()) for each in (at.floor(), at.ceil()))
        return below.lerp(above, counted - at.floor())

    def work(self, config: ModelConfig, context: int, block_size: int) -> PositionalWork:
        """As in the base class, and products with all vectors: of a key a sigmoid, sum and lerp."""
        table = len(self.for_layer(0).vector) * config.head_dim
        products = 2 * table * config.num_heads * config.num_layers
        more = PositionalWork(
            flops=products + 4 * config.num_heads * sum(config.seen(context)),
            bytes=4 * table * config.num_layers,
        )
        return super().work(config, context, block_size) + more

    def for_layer(self, layer: int) -> "CoPE":
        if not self.layers:
            return self
        own = self.layers[layer]
        assert isinstance(own, CoPE)
        return own
