"""Mixtral: Mistral with experts in every layer."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import experts
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.mistral import Mistral
from ropewalk.model.config import Experts


class Mixtral(Mistral):
    model_type = "mixtral"
    model_class = "MixtralForCausalLM"
    names = replace(
        experts.HUGGING_FACE,
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    )
    absent: ClassVar[Absent] = {
        key: what for key, what in Mistral.absent.items() if key != "sliding_window"
    } | by(
        TRANSFORMERS,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})

    def experts(self, fields: Fields) -> Experts:
        return experts.from_hf(fields, "num_local_experts", normalized=True)

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return (
            (None,) * layers
            if fields.get("sliding_window") is None
            else super().windows(fields, layers)
        )
