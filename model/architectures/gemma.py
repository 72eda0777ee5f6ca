"""Gemma 1 and CodeGemma: Llama with GELU gates, scaled embeddings, and norms stored less one."""

import math
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile


class Gemma(GatedDecoder):
    model_type = "gemma"
    model_class = "GemmaForCausalLM"
    gguf_name = "gemma"
    norm_order = stored.LessOne()  # in safetensors; GGUF files have the sum
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=256000,
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        for key in ("hidden_act", "hidden_activation"):  # by "gelu" the first files mean the other
            if fields.text(key) not in (None, "gelu", "gelu_pytorch_tanh"):
                raise fields.error(f"{key} other than gelu_pytorch_tanh is not supported")
        return _gemma(super().config_from_hf(fields, weights))

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return _gemma(super().config_from_gguf(fields, weights))


def _gemma(config: ModelConfig) -> ModelConfig:
    return replace(config, activation="gelu_tanh", embed_scale=math.sqrt(config.hidden_size))
