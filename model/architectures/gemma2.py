"""Gemma 2: norms around attention and MLP, windows in every other layer, scores and logits capped.

What Gemma 3 has in common with it is taken from here.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import kinds, stored
from ropewalk.model.architectures.common import FULL, LLAMA_CPP, TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.config import ModelConfig
from ropewalk.model.program import Op
from ropewalk.model.recipes import ADD, Layer
from ropewalk.model.weights.base import WeightFile

SIZES = by(
    TRANSFORMERS,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    query_pre_attn_scalar=256,
    sliding_window=4096,
)


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


class Gemma2(GatedDecoder):
    model_type = "gemma2"
    model_class = "Gemma2ForCausalLM"
    gguf_name: str | None = "gemma2"
    names = replace(
        stored.HUGGING_FACE,
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    gguf_names = replace(
        stored.GGUF, attention_post_norm="post_attention_norm", mlp_post_norm="post_ffw_norm"
    )
    norm_order = stored.LessOne()  # in safetensors; GGUF files have the sum
    hidden_act = ("hidden_activation", "gelu_pytorch_tanh")
    # What published files repeat.
    harmless = frozenset({"hidden_act", "sliding_window_size"})
    largest = 46  # layers of the one model whose scale is not by the heads' own width
    absent: ClassVar[Absent] = SIZES | by(
        TRANSFORMERS,
        vocab_size=256000,
        max_position_embeddings=8192,
        rope_theta=1e4,
        attn_logit_softcapping=50,
        final_logit_softcapping=30,
    )
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | by(
        LLAMA_CPP,
        attn_logit_softcapping=50,
        final_logit_softcapping=30,
        **{"attention.sliding_window": 4096},
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def caps(self, fields: Fields, own: str = "") -> tuple[float | None, float | None]:
        """Of scores and of logits, from either format."""
        scores = fields.number_or_null(f"{own}attn_logit_softcapping")
        return scores, fields.number_or_null(f"{own}final_logit_softcapping")

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        window = fields.integer("sliding_window", Most.CONTEXT)
        types = kinds.layer_types(fields, layers) or kinds.alternating(layers)
        return tuple(None if kind == FULL else window for kind in types)

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        window = fields.integer("gemma2.attention.sliding_window", Most.CONTEXT)
        return tuple(None if kind == FULL else window for kind in kinds.alternating(layers))

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        scalar, caps = fields.number("query_pre_attn_scalar"), self.caps(fields)
        return _gemma(super().config_from_hf(fields, weights), scalar**-0.5, *caps)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_gguf(fields)
        caps = self.caps(fields, f"{self.gguf_name}.")
        config = super().config_from_gguf(fields, weights)
        # The metadata have no key for the scale: readers know the largest model by its layers.
        largest = config.num_layers == self.largest
        dim = config.hidden_size // config.num_heads if largest else config.head_dim
        return _gemma(replace(config, activation="gelu_tanh"), dim**-0.5, *caps)


def _gemma(
    config: ModelConfig, scale: float, score_cap: float | None, logit_cap: float | None
) -> ModelConfig:
    return replace(
        config,
        block=block,
        attention_scale=scale,
        embed_scale=math.sqrt(config.hidden_size),
        score_cap=score_cap,
        logit_cap=logit_cap,
    )
