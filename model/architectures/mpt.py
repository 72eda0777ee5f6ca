"""MPT: ALiBi with a configurable range of slopes, no biases anywhere, clipped projections."""

from dataclasses import replace
from typing import Any, ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, harmless_in_hf
from ropewalk.model.architectures.fields import Absent, Disputed, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.config import EncodingSpec, ModelConfig

NO_BIASES: dict[str, Any] = {
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}
LAYER_NORMS = (None, "low_precision_layernorm", "layernorm")  # all equal in float32
ATTENTION_OTHERS = ("attn_impl", "attn_pdrop")


class MPT(PlainDecoder):
    model_type = "mpt"
    model_class = "MptForCausalLM"
    adopted = "modeling_mpt.MPTForCausalLM"
    gguf_name = "mpt"
    absent: ClassVar[Absent] = {
        **by(
            TRANSFORMERS,
            vocab_size=50368,
            d_model=2048,
            n_layers=24,
            n_heads=16,
            max_seq_len=2048,
            layer_norm_epsilon=1e-5,
        ),
        "attn_config": Disputed("ALiBi to transformers, but learned positions to MosaicML"),
    }
    # learned_pos_emb is true even in files whose attn_config has alibi, which takes precedence.
    harmless = """
        emb_pdrop embedding_fraction init_config init_device learned_pos_emb resid_pdrop
        tokenizer_name verbose
    """
    keys = Keys("d_model", "n_layers", "n_heads", "max_seq_len", norm_eps="layer_norm_epsilon")
    names = stored.Names(
        embed="transformer.wte",
        norm="transformer.norm_f",
        head="lm_head",
        layer="transformer.blocks.{}.",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        mlp_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
    )

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        attention = fields.section("attn_config")
        if attention is None:
            raise fields.missing("attn_config")
        _refuse_other_attention(attention)
        bias_max = attention.optional_number("alibi_bias_max") or 8.0
        clip = attention.optional_number("clip_qkv")
        scale = attention.optional_number("softmax_scale")
        attention.finish(harmless_in_hf(*ATTENTION_OTHERS))
        if fields.flag("no_bias") is False:
            raise fields.error("no_bias is false, but MPT is served without biases only")
        if fields.get("logit_scale") is not None:
            raise fields.error("logit_scale is not supported")
        if fields.text("norm_type") not in LAYER_NORMS:
            raise fields.error("norm_type must be low_precision_layernorm or layernorm")
        if fields.optional_integer("expansion_ratio", 64) not in (None, 4):
            raise fields.error("expansion_ratio must be 4")
        return replace(
            usual,
            encoding=_alibi(bias_max),
            activation="gelu",
            qkv_clip=clip,
            attention_scale=scale,
            **NO_BIASES,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        # GGUF has no key for softmax_scale: converting a model that sets it loses it.
        if fields.get(own + "attention.max_alibi_bias") == 0:
            raise fields.error("attention.max_alibi_bias is 0, but MPT is served with ALiBi only")
        bias_max = fields.number(own + "attention.max_alibi_bias")
        return replace(
            usual,
            encoding=_alibi(bias_max),
            activation="gelu",
            qkv_clip=fields.optional_number(own + "attention.clamp_kqv"),
            **NO_BIASES,
        )


def _alibi(bias_max: float) -> EncodingSpec:
    return EncodingSpec("alibi", {} if bias_max == 8 else {"bias_max": bias_max})


def _refuse_other_attention(attention: Fields) -> None:
    if attention.flag("alibi") is False:
        raise attention.error("alibi is false, but MPT is served with ALiBi only")
    for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        if attention.flag(name):
            raise attention.error(f"{name} is not supported")
    if attention.text("attn_type") not in (None, "multihead_attention"):
        raise attention.error("attn_type must be multihead_attention")
