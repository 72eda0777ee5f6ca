"""GPT-2: learned positions; matrices are stored transposed."""

import re
from dataclasses import replace
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


class GPT2(PlainDecoder):
    model_type = "gpt2"
    model_class = "GPT2LMHeadModel"
    gguf_name = "gpt2"
    prefix = "transformer."
    transposed = True
    derived = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # masks
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=50257,
        n_positions=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
        layer_norm_epsilon=1e-5,
    )
    # reorder_and_upcast_attn only changes the order of rounding.
    harmless = """
        attn_pdrop embd_pdrop n_ctx reorder_and_upcast_attn resid_pdrop summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """
    names = stored.Names(
        embed="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
    )

    def shape_from_hf(self, fields: Fields) -> ModelConfig:
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if fields.flag(name):
                raise fields.error(f"{name} is not supported")
        width = fields.integer("n_embd", MAX_WIDTH)
        context = fields.integer("n_positions", MAX_CONTEXT)
        return plain_config(
            fields,
            vocab_size=fields.integer("vocab_size", MAX_VOCAB),
            width=width,
            layers=fields.integer("n_layer", MAX_LAYERS),
            heads=fields.integer("n_head", MAX_HEADS),
            ffn_width=fields.optional_integer("n_inner", MAX_FFN_WIDTH) or 4 * width,
            norm_eps=fields.number("layer_norm_epsilon"),
            trained_context=context,
            tied_embeddings=tied(fields),
            encoding=EncodingSpec("learned", {"positions": context, "offset": 0}),
            activation=activation(fields, "activation_function", "gelu_new"),
            attention_scale=1.0 if fields.flag("scale_attn_weights") is False else None,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        options = {"positions": usual.trained_context, "offset": 0}
        return replace(usual, encoding=EncodingSpec("learned", options), activation="gelu_tanh")
