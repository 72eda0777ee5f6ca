"""Mistral: Llama with a sliding window in every layer. GGUF stores it under Llama's name."""

from model.architectures.common import MAX_CONTEXT
from model.architectures.fields import Fields
from model.architectures.gated import GatedDecoder


class Mistral(GatedDecoder):
    model_type = "mistral"
    model_class = "MistralForCausalLM"

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        fields.require("sliding_window")
        return (fields.optional_integer("sliding_window", MAX_CONTEXT),) * layers
