"""SmolLM3: Llama without rotation in every fourth layer, or in the layers that it names."""

from collections.abc import Sequence
from typing import ClassVar

from ropewalk.model.architectures import kinds
from ropewalk.model.architectures.common import TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Absent, Fields, by
from ropewalk.model.architectures.gated import GatedDecoder
from ropewalk.model.architectures.rotation import ROTATED


class SmolLM3(GatedDecoder):
    model_type = "smollm3"
    model_class = "SmolLM3ForCausalLM"
    gguf_name = "smollm3"
    gguf_pairs = True
    absent: ClassVar[Absent] = ROTATED | by(
        TRANSFORMERS,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=2e6,
        no_rope_layer_interval=4,
    )

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, bool(fields.flag("mlp_bias"))

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        fields.get("max_window_layers")  # published, but unknown to the family's definition
        if fields.get("layer_types") is not None:
            return kinds.windows_by_layer(fields, layers)
        window = fields.optional_integer("sliding_window", Most.CONTEXT)
        if not fields.flag("use_sliding_window"):
            window = None
        rotated = self.rotated_layers(fields, layers)
        return tuple(None if layer in rotated else window for layer in range(layers))

    def rotated_layers(self, fields: Fields, layers: int) -> Sequence[int]:
        fields.optional_integer("no_rope_layer_interval", Most.LAYERS)
        named = fields.get("no_rope_layers")
        if named is None:
            interval = fields.integer("no_rope_layer_interval", Most.LAYERS)
            return [layer for layer in range(layers) if (layer + 1) % interval]
        if (
            not isinstance(named, list)
            or len(named) < layers
            or not all(item in (0, 1) for item in named)
        ):
            raise fields.error("no_rope_layers must have 1 (rotated) or 0 once for each layer")
        return [layer for layer in range(layers) if named[layer]]

    def rotated_layers_in_gguf(self, fields: Fields, layers: int) -> Sequence[int]:
        # GGUF has no key for it: readers assume every fourth, as in all published models.
        return [layer for layer in range(layers) if (layer + 1) % 4]
