"""Llama 1 to 3, SmolLM, TinyLlama; in GGUF also Mistral."""

from model.architectures.fields import Fields
from model.architectures.gated import GatedDecoder


class Llama(GatedDecoder):
    model_type = "llama"
    model_class = "LlamaForCausalLM"
    gguf_name = "llama"
    gguf_pairs = True

    def kv_heads(self, fields: Fields, heads: int) -> int:
        return fields.optional_integer("num_key_value_heads", heads) or heads

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, bool(fields.flag("mlp_bias"))
