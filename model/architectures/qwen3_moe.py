"""Qwen3 with experts in every layer, such as Qwen3-30B-A3B."""

from typing import ClassVar

from ropewalk.model.architectures import experts
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.qwen3 import Qwen3
from ropewalk.model.architectures.rotation import ROTATED
from ropewalk.model.config import Experts


class Qwen3MoE(Qwen3):
    model_type = "qwen3_moe"
    model_class = "Qwen3MoeForCausalLM"
    gguf_name = "qwen3moe"
    names = experts.HUGGING_FACE
    gguf_names = experts.GGUF
    inside = "moe_intermediate_size"
    gguf_inside = "expert_feed_forward_length"
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        num_experts=128,
        num_experts_per_tok=8,
    )
    harmless = frozenset(
        {
            *("output_router_logits", "router_aux_loss_coef", "intermediate_size"),
            *("sliding_window", "max_window_layers"),  # without use_sliding_window
        }
    )

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return (None,) * layers

    def experts(self, fields: Fields) -> Experts:
        if fields.get("decoder_sparse_step") not in (None, 1):
            raise fields.error("only models with experts in every layer are served")
        normalized = bool(fields.flag("norm_topk_prob"))
        # transformers saves the former where it reads the latter.
        return experts.from_hf(fields, "num_local_experts", "num_experts", normalized=normalized)

    def experts_in_gguf(self, fields: Fields) -> Experts:
        fields.get("qwen3moe.feed_forward_length")  # of layers without experts, of which are none
        return experts.from_gguf(fields, "qwen3moe.", normalized=True)
