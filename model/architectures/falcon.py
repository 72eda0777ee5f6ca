"""Falcon-RW: the Falcon models with ALiBi. Those with RoPE have other shapes and are refused."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, Most, activation
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
from ropewalk.model.config import EncodingSpec, ModelConfig

FALCON_RW = {
    "alibi": True,
    "new_decoder_architecture": False,
    "multi_query": False,
    "parallel_attn": False,
}


class Falcon(PlainDecoder):
    model_type = "falcon"  # no gguf_name: in GGUF a falcon has RoPE
    model_class = "FalconForCausalLM"
    adopted = "modeling_falcon.FalconForCausalLM"
    prefix = "transformer."
    fused_by_head = True
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=65024,
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=2048,
    )
    # Read only by models with RoPE, or older names besides the newer ones.
    harmless = """
        apply_residual_connection_post_layernorm hidden_dropout num_kv_heads
        num_ln_in_parallel_attn rope_parameters rope_theta
    """
    keys = Keys(norm_eps="layer_norm_epsilon")
    names = stored.BLOOM

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        for name, value in FALCON_RW.items():
            if fields.flag(name) is not value:
                raise fields.error(
                    f"{name} is not {str(value).lower()}, but of Falcon only Falcon-RW is served"
                )
        bias = bool(fields.flag("bias"))
        # ALiBi is added before the scores are scaled, and rounded to bfloat16.
        alibi = {"scaled": True, "hf_exact": True}
        return replace(
            usual,
            intermediate_size=fields.optional_integer("ffn_hidden_size", Most.FFN_WIDTH)
            or usual.intermediate_size,
            encoding=EncodingSpec("alibi", alibi),
            activation=activation(fields, "activation", "gelu"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
