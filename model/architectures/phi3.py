"""Phi-3, Phi-3.5 mini and Phi-4 (mini): Llama with q, k, v fused and gate, up fused."""

from collections.abc import Mapping
from typing import ClassVar

from model.architectures import stored
from model.architectures.common import MAX_CONTEXT
from model.architectures.fields import Fields
from model.architectures.gated import GatedDecoder
from model.architectures.stored import Parameters, Stored
from model.config import ModelConfig
from model.weights.base import WeightFile


class Phi3(GatedDecoder):
    model_type = "phi3"
    model_class = "Phi3ForCausalLM"
    gguf_name = "phi3"
    adopted = "modeling_phi3.Phi3ForCausalLM"
    harmless = frozenset({"embd_pdrop", "resid_pdrop"})
    # The first checkpoints called longrope "su", and one of its drafts "yarn".
    rope_kinds: ClassVar[Mapping[str, str]] = {
        "default": "default",
        "longrope": "longrope",
        "su": "longrope",
        "yarn": "longrope",
    }

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        # Phi-4 mini states these at 1; the code that was published with it reads neither.
        for key in ("full_attn_mod", "interpolate_factor"):
            if fields.get(key) not in (None, 1):
                raise fields.error(f"{key} other than 1 is not supported")
        return super().config_from_hf(fields, weights)

    def kv_heads(self, fields: Fields, heads: int) -> int:
        return fields.optional_integer("num_key_value_heads", heads) or heads

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return (fields.optional_integer("sliding_window", MAX_CONTEXT),) * layers

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        key = f"{self.gguf_name}.attention.sliding_window"
        if fields.get(key) == 0:  # how its converter writes that there is none
            return (None,) * layers
        return (fields.optional_integer(key, MAX_CONTEXT),) * layers

    def parameters_in_hf(self, config: ModelConfig, names: frozenset[str]) -> Parameters:
        found = stored.gated_decoder(config, stored.HUGGING_FACE, None)
        layer = "model.layers.{}."
        return _fused(config, found, f"{layer}self_attn.qkv_proj", f"{layer}mlp.gate_up_proj")

    def parameters_in_gguf(self, config: ModelConfig) -> Parameters:
        found = stored.gated_decoder(config, stored.GGUF, None)
        return _fused(config, found, "blk.{}.attn_qkv", "blk.{}.ffn_up")


def _fused(config: ModelConfig, apart: Parameters, qkv: str, gate_up: str) -> Parameters:
    """One stored matrix each, in the order that the decoder has: q, k, v; gate, up."""
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    found = dict(apart)
    for layer in range(config.layers):
        for name, stored_name, count in (
            ("attention.qkv", qkv, rows),
            ("mlp.gate_up", gate_up, 2 * config.ffn_width),
        ):
            found[f"layers.{layer}.{name}.weight"] = (
                Stored(f"{stored_name.format(layer)}.weight", (count, config.width)),
            )
    return found
