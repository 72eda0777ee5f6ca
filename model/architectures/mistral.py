"""Mistral: Llama with a sliding window in every layer. GGUF stores it under Llama's name."""

from typing import ClassVar

from ropewalk.model.architectures.common import TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Disputed, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED


class Mistral(GatedDecoder):
    model_type = "mistral"
    model_class = "MistralForCausalLM"
    absent: ClassVar[Absent] = {
        **ROTATED,
        **by(
            TRANSFORMERS,
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
        ),
        "sliding_window": Disputed("4096 to transformers, but no window to Mistral and llama.cpp"),
    }

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        fields.require("sliding_window")
        return (fields.optional_integer("sliding_window", Most.CONTEXT),) * layers
