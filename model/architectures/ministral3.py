"""Ministral 3: Llama with YaRN, whose queries grow with their position."""

from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import rotation
from ropewalk.model.architectures.common import TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.common.rope_scaling import yarn_magnitude
from ropewalk.model.weights.base import WeightFile

BETA = "llama_4_scaling_beta"


class Ministral3(GatedDecoder):
    model_type = "ministral3"
    model_class = "Ministral3ForCausalLM"
    gguf_name = "mistral3"
    gguf_pairs = True
    absent: ClassVar[Absent] = by(
        TRANSFORMERS,
        vocab_size=131072,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=34,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
    )

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return (fields.optional_integer("sliding_window", Most.CONTEXT),) * layers

    def rope(self, fields: Fields, head_dim: int, context: int, layers: int) -> EncodingSpec:
        own = fields.section("rope_parameters") or fields.section("rope_scaling")
        if own is None:
            raise fields.missing("rope_parameters")
        if own.get(BETA) is None:
            raise own.missing(BETA)
        beta = own.optional_number(BETA, zero_is_none=True)
        # The original length counts; this one repeats the model's.
        known = frozenset({BETA, "max_position_embeddings"})
        found = rotation.rope_from_hf(fields, head_dim, context, known=known)
        return _growing(found, beta, own.integer(rotation.ORIGINAL, Most.CONTEXT))

    def rope_in_gguf(
        self, fields: Fields, weights: WeightFile, head_dim: int, context: int, layers: int
    ) -> EncodingSpec:
        found = super().rope_in_gguf(fields, weights, head_dim, context, layers)
        at = "mistral3.rope.scaling."
        weight = fields.optional_number(f"{at}yarn_log_multiplier", zero_is_none=True)
        scaling = found.options.get("scaling")
        if weight is not None and scaling is not None and scaling["type"] == "yarn":
            factor = scaling["factor"]
            usual = scaling.get("magnitude", yarn_magnitude(factor))
            scaling = scaling | {"magnitude": usual / yarn_magnitude(factor, weight)}
            found = replace(found, options=found.options | {"scaling": scaling})
        beta = fields.optional_number("mistral3.attention.temperature_scale", zero_is_none=True)
        original = fields.optional_integer(f"{at}original_context_length", Most.CONTEXT)
        return _growing(found, beta, original or context)


def _growing(rope: EncodingSpec, beta: float | None, original: int) -> EncodingSpec:
    if beta is None:
        return rope
    query_scale = {"beta": beta, "original_context": original}
    return replace(rope, options=rope.options | {"query_scale": query_scale})
