"""Qwen3: queries and keys are normalised per head before they are rotated."""

from typing import ClassVar

from ropewalk.model.architectures import kinds
from ropewalk.model.architectures.common import TRANSFORMERS
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.qwen2 import Qwen2


class Qwen3(GatedDecoder):
    model_type = "qwen3"
    model_class = "Qwen3ForCausalLM"
    gguf_name = "qwen3"
    qk_norm = True
    absent: ClassVar[Absent] = Qwen2.absent | by(TRANSFORMERS, head_dim=128)

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return kinds.windows_by_layer(fields, layers)
