"""Granite with experts in every layer, such as Granite 3.1 1B-A400M."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import experts, stored
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.granite import Granite
from ropewalk.model.config import Experts


class GraniteMoe(Granite):
    model_type = "granitemoe"
    model_class = "GraniteMoeForCausalLM"
    gguf_name = "granitemoe"
    names = replace(
        stored.HUGGING_FACE,
        router="block_sparse_moe.router.layer",
        gate=None,
        up="block_sparse_moe.input_linear",
        down="block_sparse_moe.output_linear",
    )
    gguf_names = experts.GGUF
    absent: ClassVar[Absent] = Granite.absent | by(
        TRANSFORMERS, num_local_experts=8, num_experts_per_tok=2
    )
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def experts(self, fields: Fields) -> Experts:
        return experts.from_hf(fields, "num_local_experts", normalized=True)

    def experts_in_gguf(self, fields: Fields) -> Experts:
        return experts.from_gguf(fields, "granitemoe.", normalized=True)
