"""GPT-J: adjacent coordinates are rotated as pairs, and attention and MLP share one norm."""

import re
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS, Most, activation
from ropewalk.model.architectures.fields import Absent, Default, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.architectures.rotation import rope_spec
from ropewalk.model.config import ModelConfig


class GPTJ(PlainDecoder):
    model_type = "gptj"
    model_class = "GPTJForCausalLM"
    gguf_name = "gptj"
    gguf_names = replace(stored.GGUF, mlp_norm=None)
    prefix = "transformer."
    derived = re.compile(r"transformer\.h\.\d+\.attn\.((masked_)?bias|embed_positions)")
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=50400,
        n_positions=2048,
        n_embd=4096,
        n_layer=28,
        n_head=16,
        rotary_dim=64,
        layer_norm_epsilon=1e-5,
    )
    absent_in_gguf: ClassVar[Absent] = {"rope.freq_base": Default(10000.0, LLAMA_CPP)}
    harmless = """
        attn_pdrop embd_pdrop gradient_checkpointing n_ctx resid_pdrop rotary scale_attn_weights
        summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj
    """
    keys = Keys(
        "n_embd", "n_layer", "n_head", "n_positions", norm_eps="layer_norm_epsilon", tied=False
    )
    names = stored.Names(
        embed="transformer.wte",
        norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        mlp_norm=None,
        up="mlp.fc_in",
        down="mlp.fc_out",
    )

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        rotated = fields.integer("rotary_dim", Most.HEAD_DIM)
        return replace(
            usual,
            intermediate_size=fields.optional_integer("n_inner", Most.FFN_WIDTH)
            or usual.intermediate_size,
            encoding=rope_spec(fields, 10000.0, rotated, layout="interleaved"),
            activation=activation(fields, "activation_function", "gelu_new"),
            block="parallel_one_norm",
            qkv_bias=False,
            out_bias=False,
            head_bias=True,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        """Rows of queries and keys are as published: adjacent coordinates form pairs here too."""
        rotated = fields.integer(own + "rope.dimension_count", usual.head_dim)
        base = fields.number(own + "rope.freq_base")
        return replace(
            usual,
            encoding=rope_spec(fields, base, rotated, layout="interleaved"),
            activation="gelu_tanh",
            block="parallel_one_norm",
            qkv_bias=False,
            out_bias=False,
            head_bias=True,
        )
