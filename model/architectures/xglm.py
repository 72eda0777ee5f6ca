"""XGLM: sinusoidal positions from row 2 on; embeddings are multiplied by sqrt(width)."""

import re
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, activation
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.config import EncodingSpec, ModelConfig


class XGLM(PlainDecoder):
    model_type = "xglm"
    model_class = "XGLMForCausalLM"
    prefix = "model."
    derived = re.compile(r"model\.embed_positions\.weights")
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=256008,
        d_model=1024,
        num_layers=24,
        attention_heads=16,
        ffn_dim=4096,
        max_position_embeddings=2048,
    )
    harmless = "activation_dropout dropout init_std layerdrop"
    keys = Keys(
        hidden_size="d_model",
        num_layers="num_layers",
        num_heads="attention_heads",
        intermediate_size="ffn_dim",
    )
    names = stored.Names(
        embed="model.embed_tokens",
        norm="model.layer_norm",
        head="lm_head",
        layer="model.layers.{}.",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    )

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        if fields.flag("add_cross_attention"):
            raise fields.error("add_cross_attention is not supported")
        # Row 1 of the published table is zero, but positions start at row 2.
        options = {"layout": "split", "offset": 2, "slowest": "last"}
        return replace(
            usual,
            encoding=EncodingSpec("sinusoidal", options),
            activation=activation(fields, "activation_function", "gelu"),
            embed_scale=1.0 if fields.flag("scale_embedding") is False else usual.hidden_size**0.5,
        )
