"""OPT: learned positions from row 2 on; the 350M model is post-norm and projects embeddings."""

from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.absent import Absent, by
from ropewalk.model.architectures.common import (
    MAX_CONTEXT,
    MAX_FFN_WIDTH,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    TRANSFORMERS,
    activation,
)
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.plain import PlainDecoder, plain_config, tied
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

    def shape_from_hf(self, fields: Fields) -> ModelConfig:
        if fields.flag("layer_norm_elementwise_affine") is False:
            raise fields.error("layer_norm_elementwise_affine is false, which is not supported")
        if fields.flag("_remove_final_layer_norm"):
            raise fields.error("_remove_final_layer_norm is not supported")
        width = fields.integer("hidden_size", MAX_WIDTH)
        embedded = fields.optional_integer("word_embed_proj_dim", MAX_WIDTH)
        context = fields.integer("max_position_embeddings", MAX_CONTEXT)
        bias = fields.flag("enable_bias") is not False
        return plain_config(
            fields,
            vocab_size=fields.integer("vocab_size", MAX_VOCAB),
            width=width,
            layers=fields.integer("num_hidden_layers", MAX_LAYERS),
            heads=fields.integer("num_attention_heads", MAX_HEADS),
            ffn_width=fields.integer("ffn_dim", MAX_FFN_WIDTH),
            norm_eps=1e-5,
            trained_context=context,
            tied_embeddings=tied(fields),
            encoding=EncodingSpec("learned", {"positions": context, "offset": OFFSET}),
            activation=activation(fields, "activation_function", "relu"),
            block="post_norm" if fields.flag("do_layer_norm_before") is False else "pre_norm",
            embed_width=None if embedded == width else embedded,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
