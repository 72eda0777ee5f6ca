"""Llama 1 to 3, SmolLM, TinyLlama; in GGUF also Mistral."""

from typing import ClassVar

from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, Like, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED


class Llama(GatedDecoder):
    model_type = "llama"
    model_class = "LlamaForCausalLM"
    gguf_name = "llama"
    gguf_pairs = True
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=Like("num_attention_heads"),
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, bool(fields.flag("mlp_bias"))
