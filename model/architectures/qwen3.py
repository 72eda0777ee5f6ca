"""Qwen3: queries and keys are normalised per head before they are rotated."""

from model.architectures.common import MAX_HEAD_DIM
from model.architectures.fields import Fields
from model.architectures.gated import GatedDecoder, windows_by_layer


class Qwen3(GatedDecoder):
    model_type = "qwen3"
    model_class = "Qwen3ForCausalLM"
    gguf_name = "qwen3"
    qk_norm = True

    def head_dim(self, fields: Fields) -> int | None:
        # transformers' default is 128 whatever the width, so a missing value must not be guessed.
        return fields.integer("head_dim", MAX_HEAD_DIM)

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, False

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return windows_by_layer(fields, layers)
