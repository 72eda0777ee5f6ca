"""Granite 4 where it has neither experts nor state-space layers: Granite by other names."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.granite import Granite
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.weights.base import WeightFile, shown

ATTENTION = {"attention", "full_attention"}


class GraniteMoeHybrid(Granite):
    model_type = "granitemoehybrid"
    model_class = "GraniteMoeHybridForCausalLM"
    gguf_name = None  # GGUF stores them as granite
    names = replace(
        stored.HUGGING_FACE,
        gate=None,
        up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
    )
    absent: ClassVar[Absent] = Granite.absent | by(TRANSFORMERS, shared_intermediate_size=1024)
    harmless = frozenset(  # of experts, state-space layers and training
        {
            *("init_method", "num_experts_per_tok", "output_router_logits"),
            *("router_aux_loss_coef", "time_step_limit", "mamba_chunk_size", "mamba_conv_bias"),
            *("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups"),
            *("mamba_n_heads", "mamba_proj_bias"),
        }
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        fields = self.described_by_hf(fields)
        kinds, norm = fields.texts("layer_types"), fields.text("normalization_function")
        if fields.get("num_local_experts") != 0 or kinds is None or not {*kinds} <= ATTENTION:
            raise fields.error(
                "of Granite 4 only models without experts (num_local_experts is 0) and without "
                "state-space layers (layer_types has attention alone) can be served"
            )
        if norm not in (None, "rmsnorm"):
            raise fields.error(f"normalization_function {shown(norm)} is not supported")
        width = fields.integer("shared_intermediate_size", Most.FFN_WIDTH)
        fields.get("intermediate_size")  # that of the experts
        return replace(super().config_from_hf(fields, weights), intermediate_size=width)

    def rope(self, fields: Fields, head_dim: int, context: int, layers: int) -> EncodingSpec:
        kind = fields.text("position_embedding_type")
        if kind == "rope":
            return super().rope(fields, head_dim, context, layers)
        if kind not in (None, "nope"):
            raise fields.error(f"position_embedding_type {shown(kind)} is not supported")
        for without_effect in ("rope_theta", "rope_scaling", "rope_parameters"):
            fields.get(without_effect)
        return EncodingSpec("nope", {})
