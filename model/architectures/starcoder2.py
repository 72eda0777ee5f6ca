"""StarCoder2: rotation, shared key heads and windows between layer norms and plain MLPs."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS, Most, activation
from ropewalk.model.architectures.fields import Absent, Default, Fields, Like, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.architectures.rotation import ROTATED, rope_from_hf, rope_spec
from ropewalk.model.config import ModelConfig


class StarCoder2(PlainDecoder):
    model_type = "starcoder2"
    model_class = "Starcoder2ForCausalLM"
    gguf_name = "starcoder2"
    gguf_names = replace(stored.GGUF, gate=None)
    prefix = "model."
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        norm_epsilon=1e-5,
    )
    absent_in_gguf: ClassVar[Absent] = {
        "rope.freq_base": Default(10000.0, LLAMA_CPP),
        "attention.head_count_kv": Default(Like("attention.head_count"), LLAMA_CPP),
    }
    harmless = """
        activation_function attention_softmax_in_fp32 embedding_dropout layer_norm_epsilon mlp_type
        norm_type residual_dropout scale_attention_softmax_in_fp32 scale_attn_weights
    """
    keys = Keys(
        num_kv_heads="num_key_value_heads",
        intermediate_size="intermediate_size",
        norm_eps="norm_epsilon",
    )
    names = replace(stored.HUGGING_FACE, gate=None, up="mlp.c_fc", down="mlp.c_proj")

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        bias = fields.flag("use_bias") is not False
        window = fields.optional_integer("sliding_window", Most.CONTEXT)
        return replace(
            usual,
            encoding=rope_from_hf(fields, usual.head_dim, usual.trained_context, partly=False),
            windows=(window,) * usual.num_layers,
            activation=activation(fields, "hidden_act", "gelu_pytorch_tanh"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        """Windows are not in GGUF, and neither are the activation and biases: as published."""
        rotated = fields.optional_integer(own + "rope.dimension_count", usual.head_dim)
        base = fields.number(own + "rope.freq_base")
        return replace(
            usual,
            encoding=rope_spec(fields, base, rotated or usual.head_dim),
            activation="gelu_tanh",
        )
