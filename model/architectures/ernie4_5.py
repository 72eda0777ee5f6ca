"""ERNIE 4.5 without experts (0.3B): Llama rotated by adjacent coordinates."""

from typing import ClassVar

from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED


class Ernie4_5(GatedDecoder):
    model_type = "ernie4_5"
    model_class = "Ernie4_5ForCausalLM"
    adopted = "modeling_ernie4_5.Ernie4_5_ForCausalLM"
    gguf_name = "ernie4_5"
    adjacent = True
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        bias = bool(fields.flag("use_bias"))
        return bias, bias, bias
