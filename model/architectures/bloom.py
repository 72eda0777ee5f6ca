"""BLOOM: ALiBi, a norm on the embeddings, queries, keys and values fused head by head."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.absent import Absent, by
from ropewalk.model.architectures.common import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    TRANSFORMERS,
)
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.plain import PlainDecoder, plain_config, tied
from ropewalk.model.config import EncodingSpec, ModelConfig

BIGSCIENCE = "BigScience"  # of all published models; newer files leave it out


class Bloom(PlainDecoder):
    model_type = "bloom"
    model_class = "BloomForCausalLM"
    gguf_name = "bloom"
    prefix = "transformer."
    fused_by_head = True
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=250880,
        hidden_size=64,
        n_layer=2,
        n_head=8,
        layer_norm_epsilon=1e-5,
    ) | by(BIGSCIENCE, seq_length=2048)
    harmless = """
        attention_softmax_in_fp32 bias_dropout_fusion hidden_dropout masked_softmax_fusion n_inner
        offset_alibi slow_but_exact skip_bias_add skip_bias_add_qkv
    """
    names = stored.Names(
        embed="transformer.word_embeddings",
        embed_norm="transformer.word_embeddings_layernorm",
        norm="transformer.ln_f",
        head="lm_head",
        layer="transformer.h.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )

    def shape_from_hf(self, fields: Fields) -> ModelConfig:
        if fields.flag("apply_residual_connection_post_layernorm"):
            raise fields.error("apply_residual_connection_post_layernorm is not supported")
        width = _either(fields, "hidden_size", "n_embed", MAX_WIDTH)
        return plain_config(
            fields,
            vocab_size=fields.integer("vocab_size", MAX_VOCAB),
            width=width,
            layers=_either(fields, "n_layer", "num_hidden_layers", MAX_LAYERS),
            heads=_either(fields, "n_head", "num_attention_heads", MAX_HEADS),
            ffn_width=4 * width,
            norm_eps=fields.number("layer_norm_epsilon"),
            trained_context=fields.integer("seq_length", MAX_CONTEXT),
            tied_embeddings=tied(fields),
            encoding=EncodingSpec("alibi", {}),
            activation="gelu_tanh",
            embed_norm=True,
        )

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        return replace(
            usual, encoding=EncodingSpec("alibi", {}), activation="gelu_tanh", embed_norm=True
        )


def _either(fields: Fields, name: str, older: str, limit: int) -> int:
    """A number that some published files have under an older name."""
    first, second = fields.optional_integer(name, limit), fields.optional_integer(older, limit)
    if first is not None and second is not None and first != second:
        raise fields.error(f"{name} is {first}, but {older} is {second}")
    found = first if first is not None else second
    return fields.integer(name, limit) if found is None else found
