"""OLMoE: 64 experts of which each token uses 8; all queries and all keys of a token normalised."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import experts
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, Like, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import Experts, ModelConfig
from ropewalk.model.weights.base import WeightFile


class OLMoE(GatedDecoder):
    model_type = "olmoe"
    model_class = "OlmoeForCausalLM"
    gguf_name = "olmoe"
    qk_norm = True
    names = experts.HUGGING_FACE
    gguf_names = experts.GGUF
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=Like("num_attention_heads"),
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=8,
    )
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def experts(self, fields: Fields) -> Experts:
        normalized = bool(fields.flag("norm_topk_prob"))
        return experts.from_hf(fields, "num_experts", normalized=normalized)

    def experts_in_gguf(self, fields: Fields) -> Experts:
        return experts.from_gguf(fields, "olmoe.", normalized=False)

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return replace(super().config_from_hf(fields, weights), qk_norm_whole=True)

    def config_from_gguf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        return replace(super().config_from_gguf(fields, weights), qk_norm_whole=True)
