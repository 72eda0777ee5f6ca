"""OLMo 2: norms of what attention and MLP add, and of all queries and all keys of a token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import kinds, rotation, stored
from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, Like, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.program import Op
from ropewalk.model.recipes import ADD, Layer
from ropewalk.model.weights.base import WeightFile


def norm_of_added(layer: Layer) -> Iterator[Op]:
    """x + norm(attention(x)), then x + norm(mlp(x))."""
    yield from layer.attention("x")
    yield layer.norm("attention_norm", "d", "d")
    yield ADD
    yield from layer.mlp("x")
    yield layer.norm("mlp_norm", "d", "d")
    yield ADD


class OLMo2(GatedDecoder):
    model_type = "olmo2"
    model_class = "Olmo2ForCausalLM"
    gguf_name: str | None = "olmo2"
    qk_norm = True
    absent_in_gguf: ClassVar[Absent] = GatedDecoder.absent_in_gguf | by(
        LLAMA_CPP, **{"attention.sliding_window_pattern": 4}
    )
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=50304,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=Like("num_attention_heads"),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
    )
    names = replace(
        stored.HUGGING_FACE,
        attention_norm="post_attention_layernorm",
        mlp_norm="post_feedforward_layernorm",
    )
    gguf_names = replace(
        stored.GGUF, attention_norm="post_attention_norm", mlp_norm="post_ffw_norm"
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return _in_this_order(super().config_from_hf(fields, weights))

    # GGUF stores OLMo 3 as olmo2 with a window; its other layers have the same rotation, unscaled.

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return _in_this_order(super().config_from_gguf(fields, weights))

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows_in_gguf(fields, "olmo2.", layers)

    def rope_in_gguf(
        self, fields: Fields, weights: WeightFile, head_dim: int, context: int, layers: int
    ) -> EncodingSpec:
        far = super().rope_in_gguf(fields, weights, head_dim, context, layers)
        full, base = kinds.full_layers_in_gguf(fields, "olmo2.", layers), far.options["base"]
        if len(full) == layers:
            return far
        if fields.optional_number("olmo2.rope.freq_base_swa") not in (None, base):
            raise fields.error("rope.freq_base_swa differs from rope.freq_base")
        return kinds.either(far, full, rotation.rope_spec(fields, base, far.options["width"]))


def _in_this_order(config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm_whole=True, block=norm_of_added)
