"""Qwen2 and Qwen2.5: biases on q, k and v; sliding windows in some layers of some models."""

from dataclasses import replace

from model.architectures.fields import Fields
from model.architectures.gated import GatedDecoder, windows_by_layer
from model.config import ModelConfig
from model.weights.base import WeightFile


class Qwen2(GatedDecoder):
    model_type = "qwen2"
    model_class = "Qwen2ForCausalLM"
    gguf_name = "qwen2"

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return True, False, False

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return windows_by_layer(fields, layers)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        # A file without these biases is broken, not a Qwen2 without biases.
        return replace(super().config_from_gguf(fields, weights), qkv_bias=True)
