"""SmolLM3: Llama without rotation in every fourth layer, or in the layers that it names."""

from collections.abc import Sequence

from model.architectures.common import MAX_CONTEXT, MAX_LAYERS
from model.architectures.fields import Fields
from model.architectures.gated import GatedDecoder, windows_by_layer


class SmolLM3(GatedDecoder):
    model_type = "smollm3"
    model_class = "SmolLM3ForCausalLM"
    gguf_name = "smollm3"
    gguf_pairs = True

    def kv_heads(self, fields: Fields, heads: int) -> int:
        # transformers' default is 4 whatever the heads, so a missing value must not be guessed.
        fields.require("num_key_value_heads")
        return fields.optional_integer("num_key_value_heads", heads) or heads

    def biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention = bool(fields.flag("attention_bias"))
        return attention, attention, bool(fields.flag("mlp_bias"))

    def windows(self, fields: Fields, layers: int) -> tuple[int | None, ...]:
        fields.get("max_window_layers")  # published, but unknown to the family's definition
        if fields.get("layer_types") is not None:
            return windows_by_layer(fields, layers)
        window = fields.optional_integer("sliding_window", MAX_CONTEXT)
        if not fields.flag("use_sliding_window"):
            window = None
        turning = self.turning_layers(fields, layers)
        return tuple(None if layer in turning else window for layer in range(layers))

    def turning_layers(self, fields: Fields, layers: int) -> Sequence[int]:
        interval = fields.optional_integer("no_rope_layer_interval", MAX_LAYERS)
        named = fields.get("no_rope_layers")
        if named is None:
            if interval is None:
                raise fields.missing("no_rope_layers")
            return [layer for layer in range(layers) if (layer + 1) % interval]
        if (
            not isinstance(named, list)
            or len(named) < layers
            or not all(item in (0, 1) for item in named)
        ):
            raise fields.error("no_rope_layers must have 1 (rotated) or 0 once for each layer")
        return [layer for layer in range(layers) if named[layer]]

    def turning_layers_in_gguf(self, layers: int) -> Sequence[int]:
        # GGUF has no key for it: readers assume every fourth, as in all published models.
        return [layer for layer in range(layers) if (layer + 1) % 4]
