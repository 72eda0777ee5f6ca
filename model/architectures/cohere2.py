"""Cohere 2 (Command R7B, Tiny Aya): attention and MLP share one norm, and only layers that see a
window are rotated, by adjacent coordinates."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import kinds, stored
from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, Like, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile


class Cohere2(GatedDecoder):
    model_type = "cohere2"
    model_class = "Cohere2ForCausalLM"
    gguf_name = "cohere2"
    names = replace(stored.HUGGING_FACE, mlp_norm=None)
    gguf_names = replace(stored.GGUF, mlp_norm=None)
    adjacent = True
    norm_eps = "layer_norm_eps"
    gguf_norm_eps = "attention.layer_norm_epsilon"
    # Of the training code; its `rotary_pct` is read.
    harmless = frozenset(
        {
            *("layer_switch", "order_of_interleaved_layers", "position_embedding_type"),
            *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
            *("use_parallel_embedding", "use_qk_norm"),
        }
    )
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=256000,
        hidden_size=8192,
        intermediate_size=22528,
        logit_scale=0.0625,
        num_hidden_layers=40,
        num_attention_heads=64,
        num_key_value_heads=Like("num_attention_heads"),
        max_position_embeddings=8192,
        layer_norm_eps=1e-5,
        sliding_window=4096,
        sliding_window_pattern=4,
    )
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | by(
        LLAMA_CPP, **{"attention.sliding_window_pattern": 4}
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows(fields, layers)

    def rotated_layers(self, fields: Fields, layers: int) -> Sequence[int]:
        return kinds.without(kinds.full_layers(fields, layers), layers)

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        fields.require("cohere2.attention.sliding_window")
        return kinds.windows_in_gguf(fields, "cohere2.", layers)

    def rotated_layers_in_gguf(self, fields: Fields, layers: int) -> Sequence[int]:
        return kinds.without(kinds.full_layers_in_gguf(fields, "cohere2.", layers), layers)

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        if fields.optional_number("rotary_pct") not in (None, 1.0):
            raise fields.error("rotary_pct is not supported, but 1")
        factor = fields.number("logit_scale")
        return _cohere(super().config_from_hf(fields, weights), factor)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_gguf(fields)
        factor = fields.number("cohere2.logit_scale")
        return _cohere(super().config_from_gguf(fields, weights), factor)


def _cohere(config: ModelConfig, factor: float) -> ModelConfig:
    return replace(config, norm="layer", block="parallel_one_norm", logit_scale=factor)
