"""GPT-2: learned positions; matrices are stored transposed."""

import re
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, Most, activation
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
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
    keys = Keys("n_embd", "n_layer", "n_head", "n_positions", norm_eps="layer_norm_epsilon")
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

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if fields.flag(name):
                raise fields.error(f"{name} is not supported")
        return replace(
            usual,
            intermediate_size=fields.optional_integer("n_inner", Most.FFN_WIDTH)
            or usual.intermediate_size,
            encoding=EncodingSpec("learned", {"positions": usual.trained_context, "offset": 0}),
            activation=activation(fields, "activation_function", "gelu_new"),
            attention_scale=1.0 if fields.flag("scale_attn_weights") is False else None,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        options = {"positions": usual.trained_context, "offset": 0}
        return replace(usual, encoding=EncodingSpec("learned", options), activation="gelu_tanh")
