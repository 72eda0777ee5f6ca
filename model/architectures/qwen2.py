"""Qwen2 and Qwen2.5: biases on q, k and v; sliding windows in some layers of some models."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import kinds
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile


class Qwen2(GatedDecoder):
    model_type = "qwen2"
    model_class = "Qwen2ForCausalLM"
    gguf_name = "qwen2"
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=4096,  # where use_sliding_window is true
        max_window_layers=28,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return True, False, False

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows_by_layer(fields, layers)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        # A file without these biases is broken, not a Qwen2 without biases.
        return replace(super().config_from_gguf(fields, weights), qkv_bias=True)
