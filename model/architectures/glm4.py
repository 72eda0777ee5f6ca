"""GLM-4 (GLM-4-0414, GLM-Z1): norms around attention and MLP, and half of each head rotates."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import gemma2, stored
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile


class GLM4(GatedDecoder):
    model_type = "glm4"
    model_class = "Glm4ForCausalLM"
    gguf_name = "glm4"
    adjacent = True
    rotates_partly = True
    names = replace(
        stored.HUGGING_FACE,
        attention_post_norm="post_self_attn_layernorm",
        mlp_norm="post_attention_layernorm",
        gate=None,
        up="mlp.gate_up_proj",
        mlp_post_norm="post_mlp_layernorm",
    )
    gguf_names = replace(
        stored.GGUF,
        attention_post_norm="post_attention_norm",
        gate=None,
        mlp_post_norm="post_ffw_norm",
    )
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        partial_rotary_factor=0.5,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return fields.flag("attention_bias") is not False, False, False

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return replace(super().config_from_hf(fields, weights), block=gemma2.block)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return replace(super().config_from_gguf(fields, weights), block=gemma2.block)
