"""Layers of two kinds: those that see all keys, and those that see a window.

Which are which, and how each kind is rotated, from descriptions in both formats. Knows no
particular family.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ropewalk.model.architectures import rotation
from ropewalk.model.architectures.common import FULL, SLIDING, TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Fields, by
from ropewalk.model.config import EncodingSpec


def windows_by_layer(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """use_sliding_window, sliding_window, and layer_types or max_window_layers, as in Qwen.

    Older files give max_window_layers, the number of leading layers with full attention.
    """
    window = fields.optional_integer("sliding_window", Most.CONTEXT)
    fields.get("max_window_layers")
    types = layer_types(fields, layers)
    if not fields.flag("use_sliding_window"):
        window = None
    elif not fields.states("sliding_window"):
        window = fields.integer("sliding_window", Most.CONTEXT)
    if types is None:
        if window is None:
            return (None,) * layers
        first = fields.integer("max_window_layers", 1 << 30)
        return tuple(None if layer < first else window for layer in range(layers))
    if window is None and SLIDING in types:
        raise fields.error(f"layer_types has {SLIDING}, but there is no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def layer_types(fields: Fields, layers: int) -> list[str] | None:
    """FULL or SLIDING for each layer, where a config.json says it."""
    types = fields.texts("layer_types")
    if types is not None and (len(types) != layers or not {*types} <= {FULL, SLIDING}):
        raise fields.error(f"layer_types must have {FULL} or {SLIDING} once for each layer")
    return types


def alternating(layers: int) -> list[str]:
    """From a window to all keys and back."""
    return [(SLIDING, FULL)[layer % 2] for layer in range(layers)]


def full_layers(fields: Fields, layers: int) -> Sequence[int]:
    """Which layers see all keys, from layer_types, or else every so manieth."""
    fields.get("sliding_window_pattern")
    types = layer_types(fields, layers)
    if types is not None:
        return [layer for layer in range(layers) if types[layer] == FULL]
    every = fields.integer("sliding_window_pattern", Most.LAYERS)
    return range(every - 1, layers, every)


def without(some: Sequence[int], layers: int) -> Sequence[int]:
    """The other layers."""
    return [layer for layer in range(layers) if layer not in some]


def windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """sliding_window in all layers but the full ones."""
    window = fields.integer("sliding_window", Most.CONTEXT)
    full = full_layers(fields, layers)
    return tuple(None if layer in full else window for layer in range(layers))


def full_layers_in_gguf(fields: Fields, own: str, layers: int) -> Sequence[int]:
    """The same, from GGUF metadata: all of them without a window."""
    key = own + "attention.sliding_window_pattern"
    pattern = fields.get(key)
    if fields.get(own + "attention.sliding_window") is None:
        return range(layers)
    if isinstance(pattern, list):  # whether a layer sees a window
        if len(pattern) != layers or not all(isinstance(each, bool) for each in pattern):
            raise fields.error(f"{key} must be a number, or true or false once for each layer")
        return [layer for layer in range(layers) if not pattern[layer]]
    every = fields.integer(key, Most.LAYERS)
    return range(every - 1, layers, every)


def windows_in_gguf(fields: Fields, own: str, layers: int) -> tuple[int | None, ...]:
    window = fields.optional_integer(own + "attention.sliding_window", Most.CONTEXT)
    full = full_layers_in_gguf(fields, own, layers)
    return tuple(None if layer in full else window for layer in range(layers))


def rope_by_layer(
    fields: Fields,
    head_dim: int,
    context: int,
    *,
    full: Sequence[int],
    thetas: Mapping[str, float],
    near: Callable[[], float],
) -> EncodingSpec:
    """One rotation of the full layers and one of the others, from config.json.

    Newer files have both in rope_parameters. thetas: what a missing rope_theta means there, for
    FULL and SLIDING. near: gives that of the other layers in older files.
    """
    kinds = fields.section("rope_parameters")
    if kinds is None:
        far = rotation.rope_from_hf(fields, head_dim, context, partly=False)
        return either(far, full, rotation.rope_spec(fields, near(), head_dim))
    if fields.get("rope_scaling") is not None:
        raise fields.error("rope_parameters and rope_scaling are both there; state one of them")
    specs = {}
    for kind, theta in thetas.items():
        own = {"rope_parameters": kinds.get(kind)}
        of_kind = Fields(f"{kinds.where}: {kind}", own, by(TRANSFORMERS, rope_theta=theta))
        specs[kind] = rotation.rope_from_hf(of_kind, head_dim, context, partly=False)
        of_kind.finish()
    kinds.finish()
    return either(specs[FULL], full, specs[SLIDING])


def either(far: EncodingSpec, full: Sequence[int], near: EncodingSpec) -> EncodingSpec:
    """far: the rotation of the full layers; near: that of the others."""
    if far == near:
        return far
    return replace(far, options=far.options | {"layers": list(full), "elsewhere": near.options})
