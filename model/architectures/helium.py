"""Helium 1: Llama rotated by adjacent coordinates."""

from typing import ClassVar

from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED


class Helium(GatedDecoder):
    model_type = "helium"
    model_class = "HeliumForCausalLM"
    adjacent = True
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=48000,
        hidden_size=2560,
        intermediate_size=7040,
        num_hidden_layers=24,
        num_attention_heads=20,
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-8,
        rope_theta=100000.0,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return bool(fields.flag("attention_bias")), False, bool(fields.flag("mlp_bias"))
