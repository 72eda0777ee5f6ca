"""ALiBi: each head lowers the score of a key in proportion to its distance.

Knows slopes and distances only. Positions do not enter queries, keys or values, so cached entries
do not depend on their position.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    EncodingError,
    KeyBias,
    LinearBias,
    PositionalEncoding,
    need_table,
)


def slopes(heads: int, bias_max: float = 8.0) -> torch.Tensor:
    """[heads] float32, in the order of the heads (arXiv 2108.12409, section 3).

    For n heads, n a power of two, head h (from 1 on) has 2^(-bias_max · h / n). For other n, the
    slopes of the next lower power of two come first, then every other slope of twice that power:
    the rule of BLOOM and Falcon; MPT's gives the same values in the same order.
    """
    exact = 1 << (heads.bit_length() - 1)
    found = _powers(exact, bias_max)
    if exact != heads:
        found = torch.cat((found, _powers(2 * exact, bias_max)[::2]))
    return found[:heads].float()


def _powers(heads: int, bias_max: float) -> torch.Tensor:
    return 2.0 ** (torch.arange(1, heads + 1, dtype=torch.float64) * (-bias_max / heads))


class ALiBi(PositionalEncoding):
    """Press et al., Train Short, Test Long (arXiv 2108.12409), section 3.

    The bias is -slope · distance in float32. `hf_exact` instead adds slope · key position, with
    slope, position and product in bfloat16, as transformers computes Falcon-RW. That differs by a
    constant per query, which softmax ignores, and by rounding, which it does not: at position
    2,000 only a few distinct values remain among the nearest 64 keys.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "bias_max": "the last of n heads has slope 2^-bias_max if n is a power of two; default 8",
        "scaled": "the bias is scaled like q · k, as in Falcon-RW; default false",
        "hf_exact": "round as transformers does for Falcon-RW; default false",
    }
    LIMIT = "none; with hf_exact, the served context: the bias is tabulated for its positions only"
    BEYOND_TRAINED = (
        "computes as before: a key farther away than in training gets a lower bias than any key "
        "did there, so answers depend mostly on nearer keys"
    )

    def __init__(
        self,
        *,
        heads: int,
        bias_max: float,
        scale: float,
        hf_exact: bool,
        context: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        # Plain attributes: they stay float32 when the model is cast, and out of checkpoints.
        self.slopes = (slopes(heads, bias_max) * scale).to(device)
        self.by_key: torch.Tensor | None = None  # [heads, context]
        if hf_exact:
            self.max_positions = context
            rounded = slopes(heads, bias_max).bfloat16()[:, None] * torch.arange(context)
            self.by_key = (rounded.float() * scale).to(device)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Options: OPTIONS above; none is required."""
        if not options.keys() <= cls.OPTIONS.keys():
            raise EncodingError(
                f"alibi takes the options {', '.join(cls.OPTIONS)}, but got {sorted(options)}."
            )
        bias_max = options.get("bias_max", 8)
        if not bias_max > 0:
            raise EncodingError(f"alibi needs a bias_max above 0, but got {bias_max}.")
        if options.get("hf_exact", False):
            need_table("alibi", config.num_heads, context)
        scaled = options.get("scaled", False)
        return cls(
            heads=config.num_heads,
            bias_max=bias_max,
            scale=(config.attention_scale or config.head_dim**-0.5) if scaled else 1.0,
            hf_exact=options.get("hf_exact", False),
            context=context,
            device=device,
        )

    def fixed_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"slopes": self.slopes}
        return tensors if self.by_key is None else tensors | {"by_key": self.by_key}

    def score_bias(self) -> LinearBias | KeyBias:
        return LinearBias(self.slopes) if self.by_key is None else KeyBias(self.by_key)
