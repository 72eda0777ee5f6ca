"""GPT-NeoX and Pythia: partly rotated heads; attention and MLP both read a layer's input."""

import re
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import LLAMA_CPP, TRANSFORMERS, activation
from ropewalk.model.architectures.fields import Absent, Default, Disputed, Fields, Like, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.architectures.rotation import rope_from_hf, rope_spec
from ropewalk.model.config import ModelConfig

# At the top level: keys that transformers does not read in this family, what it reads instead, and
# what it takes that to be where it is absent.
READ_ELSEWHERE = (
    ("rope_theta", "rotary_emb_base", 10000.0),
    ("partial_rotary_factor", "rotary_pct", 0.25),
)
NEWER_HEAD = "lm_head.weight"  # in files with transformers' in-memory names


class GPTNeoX(PlainDecoder):
    model_type = "gpt_neox"
    model_class = "GPTNeoXForCausalLM"
    gguf_name = "gptneox"
    fused_by_head = True
    derived = re.compile(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)")
    absent: ClassVar[Absent] = {
        **by(
            TRANSFORMERS,
            vocab_size=50432,
            hidden_size=6144,
            num_hidden_layers=44,
            num_attention_heads=64,
            intermediate_size=24576,
            max_position_embeddings=2048,
            original_max_position_embeddings=Like("max_position_embeddings"),
            layer_norm_eps=1e-5,
            rotary_emb_base=10000.0,
        ),
        "rotary_pct": Disputed("0.25 to transformers, but 1 to EleutherAI's own code"),
    }
    absent_in_gguf: ClassVar[Absent] = {"rope.freq_base": Default(10000.0, LLAMA_CPP)}
    harmless = """
        attention_probs_dropout_prob gradient_checkpointing hidden_dropout hidden_dropout_prob
        is_decoder
    """
    keys = Keys(intermediate_size="intermediate_size", norm_eps="layer_norm_eps", tied=False)
    names = stored.Names(
        embed="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{}.",
        attention_norm="input_layernorm",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        for newer, older, default in READ_ELSEWHERE:
            if not fields.states(older) and fields.get(newer) not in (None, default):
                raise fields.error(f"transformers reads {older}, not {newer}, so state it, too")
        bias = fields.flag("attention_bias") is not False
        return replace(
            usual,
            encoding=rope_from_hf(
                fields,
                usual.head_dim,
                usual.trained_context,
                older=("rotary_emb_base", "rotary_pct"),
            ),
            activation=activation(fields, "hidden_act", "gelu"),
            block="pre_norm" if fields.flag("use_parallel_residual") is False else "parallel",
            qkv_bias=bias,
            out_bias=bias,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        parallel = fields.flag(own + "use_parallel_residual")
        if parallel is None:
            raise fields.missing(own + "use_parallel_residual")
        rotated = fields.optional_integer(own + "rope.dimension_count", usual.head_dim)
        base = fields.number(own + "rope.freq_base")
        return replace(
            usual,
            encoding=rope_spec(fields, base, rotated or usual.head_dim),
            activation="gelu",  # not stated in GGUF: as in Pythia
            block="parallel" if parallel else "pre_norm",
        )

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> stored.Parameters:
        found = super().parameters_in_hf(config, names)
        if NEWER_HEAD not in names or config.tied_embeddings:
            return found
        return {**found, "head.weight": (replace(found["head.weight"][0], name=NEWER_HEAD),)}

    def copies(self, config: ModelConfig, names: frozenset[str]) -> dict[str, str]:
        found = super().copies(config, names)
        if config.tied_embeddings:
            found[NEWER_HEAD] = f"{self.names.embed}.weight"
        return found
