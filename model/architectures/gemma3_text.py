"""Gemma 3, its text alone: two rotations by kind of layer, and norms around attention and MLP."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import kinds, rotation, stored
from ropewalk.model.architectures.common import FULL, LLAMA_CPP, SLIDING, TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.program import Op
from ropewalk.model.recipes import ADD, Layer
from ropewalk.model.weights.base import WeightFile


def block(layer: Layer) -> Iterator[Op]:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""
    yield layer.norm("attention_norm")
    yield from layer.attention()
    yield layer.norm("attention_post_norm", "d", "d")
    yield ADD
    yield layer.norm("mlp_norm")
    yield from layer.mlp()
    yield layer.norm("mlp_post_norm", "d", "d")
    yield ADD


class Gemma3Text(GatedDecoder):
    model_type = "gemma3_text"
    model_class = "Gemma3ForCausalLM"
    gguf_name: str | None = "gemma3"
    names = replace(
        stored.HUGGING_FACE,
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    gguf_names = replace(
        stored.GGUF, attention_post_norm="post_attention_norm", mlp_post_norm="post_ffw_norm"
    )
    qk_norm = True
    norm_order = stored.LessOne()  # in safetensors; GGUF files have the sum
    hidden_act = ("hidden_activation", "gelu_pytorch_tanh")
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=262208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=4096,
        sliding_window_pattern=6,
    )
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | by(
        LLAMA_CPP, **{"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 6}
    )

    def head_dim(self, fields: Fields) -> int | None:
        return fields.integer("head_dim", Most.HEAD_DIM)

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        scalar = fields.number("query_pre_attn_scalar")
        return _gemma(super().config_from_hf(fields, weights), scalar**-0.5)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        config = super().config_from_gguf(fields, weights)
        # The metadata have no key for the scale: readers know the largest model by its layers.
        largest = config.num_layers == 62
        dim = config.hidden_size // config.num_heads if largest else config.head_dim
        return _gemma(replace(config, activation="gelu_tanh"), dim**-0.5)

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows(fields, layers)

    def rope(self, fields: Fields, head_dim: int, context: int, layers: int) -> EncodingSpec:
        return kinds.rope_by_layer(
            fields,
            head_dim,
            context,
            full=kinds.full_layers(fields, layers),
            thetas={FULL: 1e6, SLIDING: 1e4},
            near=lambda: fields.number("rope_local_base_freq"),
        )

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows_in_gguf(fields, "gemma3.", layers)

    def rope_in_gguf(
        self, fields: Fields, weights: WeightFile, head_dim: int, context: int, layers: int
    ) -> EncodingSpec:
        far = super().rope_in_gguf(fields, weights, head_dim, context, layers)
        base = fields.number("gemma3.rope.freq_base_swa")
        near = rotation.rope_spec(fields, base, far.options["width"])
        return kinds.either(far, kinds.full_layers_in_gguf(fields, "gemma3.", layers), near)


def _gemma(config: ModelConfig, attention_scale: float) -> ModelConfig:
    return replace(
        config,
        block=block,
        attention_scale=attention_scale,
        embed_scale=math.sqrt(config.hidden_size),
    )
