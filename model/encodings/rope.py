"""Rotary position embedding: pairs of query and key coordinates turn with the position.

Keys are rotated once, at their own position, when they are written. With fixed frequencies
nothing that happens later changes them.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from model.config import ModelConfig
from model.encodings.base import EncodingError, PositionalEncoding

Layout = Literal["half", "interleaved"]


class RoPE(PositionalEncoding):
    """Su et al., RoFormer (arXiv 2104.09864), section 3.2.

    Pair i of the first `width` coordinates turns by position · base^(-2i / width). `half` pairs
    coordinate i with i + width/2 (Llama as published on Hugging Face), `interleaved` pairs 2i
    with 2i + 1 (GPT-J). Coordinates past `width` are left alone.
    """

    def __init__(
        self, *, base: float, width: int, layout: Layout, context: int, device: torch.device
    ) -> None:
        super().__init__()
        self.width = width
        self.layout = layout
        self.max_positions = context
        # float32 whatever the model's dtype: in bfloat16, neighbouring positions share an angle
        # from position 256 on. Plain attributes, so that casting the model leaves them alone.
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        angles = torch.arange(context, dtype=torch.float32)[:, None] * (1.0 / base**exponents)
        self.cos = angles.cos().to(device)  # [context, width / 2]
        self.sin = angles.sin().to(device)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options: base > 0, width (even, at most head_dim), layout. All are required."""
        if set(options) != {"base", "width", "layout"}:
            raise EncodingError(
                f"rope takes the options base, width and layout, but got {sorted(options)}."
            )
        base, width, layout = options["base"], options["width"], options["layout"]
        if not base > 0:
            raise EncodingError(f"rope needs a base above 0, but got {base}.")
        if width % 2 or not 0 < width <= config.head_dim:
            raise EncodingError(
                f"rope needs an even width of at most head_dim {config.head_dim}, but got {width}."
            )
        if layout not in get_args(Layout):
            raise EncodingError(f"rope's layout is half or interleaved, but got {layout!r}.")
        return cls(base=base, width=width, layout=layout, context=context, device=device)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, heads, head_dim]; cos and sin [T, 1, width / 2]. One rounding, at the end."""
        turning, rest = x[..., : self.width], x[..., self.width :]
        if self.layout == "half":
            a, b = turning.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((turned.to(x.dtype), rest), dim=-1)
