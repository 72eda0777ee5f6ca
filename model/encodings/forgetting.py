"""The Forgetting Transformer's gates: each token decides how much of the past it lets others see.

No position takes part. How far a key seems to be depends on what was said since, so a gate is
stored beside each key, and attention adds up those of the tokens between.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import EncodingError, ForgetGates, PositionalEncoding


class Forgetting(PositionalEncoding):
    """Lin et al. (arXiv 2503.02130): ALiBi whose slope each token and head chooses anew."""

    BEYOND_TRAINED = (
        "computes as before: a score falls by what the tokens between key and query decide, "
        "however many they are"
    )

    def __init__(self, heads: int, width: int, device: torch.device, layers: int = 0) -> None:
        """One layer's gates, or those of so many layers."""
        super().__init__()
        self.layers = nn.ModuleList(Forgetting(heads, width, device) for _ in range(layers))
        if layers:
            return
        # float32 whatever the model's dtype: a gate's error is added up thousands of times.
        weight, bias = (
            torch.empty(size, dtype=torch.float32, device=device)
            for size in ((heads, width), (heads,))
        )
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """No options."""
        if options:
            raise EncodingError(f"forgetting takes no options, but got {sorted(options)}.")
        return cls(config.num_heads, config.hidden_size, device, config.num_layers)

    def first_values(self, generator: torch.Generator) -> None:
        """Gates that all tokens share at first: of head h of H, 1/e is left after 4 · 256^(h/H)."""
        super().first_values(generator)
        for each in self.modules():
            if isinstance(each, Forgetting) and not each.layers:
                heads = torch.arange(len(each.bias)) / len(each.bias)
                each.bias.copy_(-torch.special.expm1(1 / (4 * 256**heads)).log())

    def forget_gates(self) -> ForgetGates | None:
        """None of all layers together: see `for_layer`."""
        return None if self.layers else ForgetGates(self.weight, self.bias)

    def for_layer(self, layer: int) -> PositionalEncoding:
        if not self.layers:
            return self
        own = self.layers[layer]
        assert isinstance(own, Forgetting)
        return own
