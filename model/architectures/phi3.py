"""Phi-3, Phi-3.5 mini and Phi-4 (mini): Llama with q, k, v fused and gate, up fused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Fields, Like, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ORIGINAL, ROTATED
from ropewalk.model.config import ModelConfig
from ropewalk.model.weights.base import WeightFile


class Phi3(GatedDecoder):
    model_type = "phi3"
    model_class = "Phi3ForCausalLM"
    gguf_name = "phi3"
    adopted = "modeling_phi3.Phi3ForCausalLM"
    names = replace(
        stored.HUGGING_FACE, qkv=("self_attn.qkv_proj",), gate=None, up="mlp.gate_up_proj"
    )
    gguf_names = stored.GGUF_FUSED
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=Like("num_attention_heads"),
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    harmless = frozenset({"embd_pdrop", "resid_pdrop"})
    rotates_partly = True
    # The first checkpoints called longrope "su", and one of its drafts "yarn".
    rope_kinds: ClassVar[Mapping[str, str]] = {
        "default": "default",
        "longrope": "longrope",
        "su": "longrope",
        "yarn": "longrope",
    }

    def config_from_hf(self, fields: Fields, weights: WeightFile) -> ModelConfig:
        # Phi-4 mini states these as 1; the code published with it reads neither.
        for key in ("full_attn_mod", "interpolate_factor"):
            if fields.get(key) not in (None, 1):
                raise fields.error(f"{key} other than 1 is not supported")
        if not fields.states(ORIGINAL):
            for section in (fields.get("rope_parameters"), fields.get("rope_scaling")):
                if isinstance(section, dict) and section.get(ORIGINAL) not in (None, 4096):
                    raise fields.error(
                        f"transformers reads {ORIGINAL} at the top level, so state it there, too"
                    )
        return super().config_from_hf(fields, weights)

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        return (fields.optional_integer("sliding_window", Most.CONTEXT),) * layers

    def windows_in_gguf(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        key = f"{self.gguf_name}.attention.sliding_window"
        if fields.get(key) == 0:  # what its converter writes for no window
            return (None,) * layers
        return (fields.optional_integer(key, Most.CONTEXT),) * layers
