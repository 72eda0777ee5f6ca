"""OPT: learned positions from row 2 on; the 350M model is post-norm and projects embeddings."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, Most, activation
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.config import EncodingSpec, ModelConfig

OFFSET = 2  # rows of the table that no position uses


class OPT(PlainDecoder):
    model_type = "opt"
    model_class = "OPTForCausalLM"
    prefix = "model."
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=50272,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        ffn_dim=3072,
        max_position_embeddings=2048,
    )
    harmless = "activation_dropout dropout init_std layerdrop"
    keys = Keys(intermediate_size="ffn_dim")
    names = stored.Names(
        embed="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
        norm="model.decoder.final_layer_norm",
        head="lm_head",
        layer="model.decoder.layers.{}.",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    )

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        if fields.flag("layer_norm_elementwise_affine") is False:
            raise fields.error("layer_norm_elementwise_affine is false, which is not supported")
        if fields.flag("_remove_final_layer_norm"):
            raise fields.error("_remove_final_layer_norm is not supported")
        embedded = fields.optional_integer("word_embed_proj_dim", Most.WIDTH)
        bias = fields.flag("enable_bias") is not False
        return replace(
            usual,
            encoding=EncodingSpec(
                "learned", {"positions": usual.trained_context, "offset": OFFSET}
            ),
            activation=activation(fields, "activation_function", "relu"),
            block="post_norm" if fields.flag("do_layer_norm_before") is False else "pre_norm",
            embed_width=None if embedded == usual.hidden_size else embedded,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
