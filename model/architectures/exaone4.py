"""EXAONE 4: norms of what is added. Where some layers see a window, only those are rotated."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import kinds
from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.olmo2 import OLMo2, norm_of_added
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile


class Exaone4(GatedDecoder):
    model_type = "exaone4"
    model_class = "Exaone4ForCausalLM"
    gguf_name = "exaone4"
    names = OLMo2.names
    gguf_names = OLMo2.gguf_names
    qk_norm = True
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=102400,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        sliding_window_pattern=4,
    )
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | by(
        LLAMA_CPP, **{"attention.sliding_window_pattern": 4}
    )

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return replace(super().config_from_hf(fields, weights), block=norm_of_added)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return replace(super().config_from_gguf(fields, weights), block=norm_of_added)

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        if self.rotated_layers(fields, layers) is None:
            return (None,) * layers
        return kinds.windows(fields, layers)

    def rotated_layers(self, fields: Fields, layers: int) -> Sequence[int] | None:
        if fields.states("sliding_window") and fields.get("sliding_window") is None:
            for without_effect in ("layer_types", "sliding_window_pattern"):
                fields.get(without_effect)
            return None
        return kinds.without(kinds.full_layers(fields, layers), layers)

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows_in_gguf(fields, "exaone4.", layers)

    def rotated_layers_in_gguf(self, fields: Fields, layers: int) -> Sequence[int] | None:
        if fields.get("exaone4.attention.sliding_window") is None:
            return None
        return kinds.without(kinds.full_layers_in_gguf(fields, "exaone4.", layers), layers)
