"""BLOOM: ALiBi, a norm on the embeddings, queries, keys and values fused head by head."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.plain import Keys, PlainDecoder
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
    keys = Keys(
        hidden_size=("hidden_size", "n_embed"),
        num_layers=("n_layer", "num_hidden_layers"),
        num_heads=("n_head", "num_attention_heads"),
        context="seq_length",
        norm_eps="layer_norm_epsilon",
    )
    names = stored.BLOOM

    def shape_from_hf(self, fields: Fields, usual: ModelConfig) -> ModelConfig:
        if fields.flag("apply_residual_connection_post_layernorm"):
            raise fields.error("apply_residual_connection_post_layernorm is not supported")
        return self.shape_from_gguf(fields, "", usual)

    def shape_from_gguf(self, fields: Fields, own: str, usual: ModelConfig) -> ModelConfig:
        return replace(
            usual, encoding=EncodingSpec("alibi", {}), activation="gelu_tanh", embed_norm=True
        )
