"""RoPE's settings as checkpoints state them: config.json in both spellings, and GGUF.

A setting that is unknown, contradicts another or has no effect is refused, because ignoring it
would change the answers. Knows descriptions, no particular family.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from model.architectures.common import MAX_CONTEXT
from model.architectures.fields import Fields
from model.config import EncodingSpec
from model.rope_scaling import longrope_magnitude, yarn_magnitude
from model.rotation import Layout
from model.weights.base import WeightFile, shown

# Copies of the frequencies beside the weights of old checkpoints.
ROTATION_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Tensors of GGUF that are read into the description.
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
)
KINDS: Mapping[str, str] = {
    kind: kind
    for kind in ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
}


def rope_spec(
    fields: Fields,
    base: float,
    width: int,
    *,
    layout: Layout = "half",
    scaling: Mapping[str, Any] | None = None,
    layers: Sequence[int] | None = None,
) -> EncodingSpec:
    """The encoding with the options that are not at their default. Raises CheckpointError."""
    if width % 2:
        raise fields.error(f"{width} coordinates cannot turn in pairs")
    options: dict[str, Any] = {"base": base, "width": width, "layout": layout}
    if scaling is not None:
        options["scaling"] = dict(scaling)
    if layers is not None:
        options["layers"] = list(layers)
    return EncodingSpec("rope", options)


def rope_from_hf(
    fields: Fields,
    head_dim: int,
    context: int,
    *,
    kinds: Mapping[str, str] = KINDS,
    layers: Sequence[int] | None = None,
) -> EncodingSpec:
    """From `rope_theta` and `rope_scaling`, or `rope_parameters` as newer files have it.

    context: max_position_embeddings. kinds: the family's names for types of scaling → ours.
    """
    base = fields.optional_number("rope_theta")
    share = fields.optional_number("partial_rotary_factor")
    original = fields.optional_integer("original_max_position_embeddings", MAX_CONTEXT)
    sections, stated = [], set()
    for key in ("rope_parameters", "rope_scaling"):
        section = fields.section(key)
        if section is None:
            continue
        kind = _kind(section, kinds)
        base = _agreed(section, "rope_theta", base)
        share = _agreed(section, "partial_rotary_factor", share)
        original = _agreed_integer(section, "original_max_position_embeddings", original)
        sections.append((section, kind))
        stated |= set() if kind is None else {kind}
    if len(stated) > 1:
        raise fields.error("rope_parameters and rope_scaling have different types")
    if base is None:
        raise fields.missing("rope_theta")
    if share is not None and share > 1:
        raise fields.error(f"partial_rotary_factor must be at most 1, not {share}")
    width = head_dim if share is None else int(head_dim * share) or 1
    found: list[dict[str, Any]] = []
    for section, kind in sections:
        scaling = _scaling(section, kind or "default", width, context, original)
        section.finish()
        if scaling is not None and scaling not in found:
            found.append(scaling)
    if len(found) > 1:
        raise fields.error("rope_parameters and rope_scaling differ")
    scaling = found[0] if found else None
    if scaling is not None and scaling["type"] == "proportional":
        # Here the share is one of frequencies over the whole head, not a narrower rotation.
        width, scaling["share"] = head_dim, share or 1.0
    return rope_spec(fields, base, width, scaling=scaling, layers=layers)


def _kind(section: Fields, kinds: Mapping[str, str]) -> str | None:
    """Both spellings of the type; None when neither is there."""
    found = []
    for name in (section.text("rope_type"), section.text("type")):
        if name is None:
            continue
        if name not in kinds:
            raise section.error(f"the type {shown(name)} is not supported")
        found.append(kinds[name])
    if len({*found}) > 1:
        raise section.error("rope_type and type differ")
    return found[0] if found else None


def _scaling(
    section: Fields, kind: str, width: int, context: int, original: int | None
) -> dict[str, Any] | None:
    """The parameters of one section. Those that stay unread are refused when it is finished."""
    match kind:
        case "linear":
            return {"type": "linear", "factor": section.number("factor")}
        case "proportional":
            factor = section.optional_number("factor")
            return {"type": "proportional", "factor": 1.0 if factor is None else factor}
        case "dynamic":
            # The published formula starts from max_position_embeddings, whatever else is there.
            if original not in (None, context):
                raise section.error(
                    f"original_max_position_embeddings is {original}, but a dynamic scaling "
                    f"starts from max_position_embeddings, {context}"
                )
            factor = section.number("factor")
            return {"type": "dynamic", "factor": factor, "original_context": context}
        case "llama3":
            return _llama3(section, original)
        case "yarn":
            # Absent, it has a meaning: trained at max_position_embeddings, to be stretched.
            return _yarn(section, context if original is None else original)
        case "longrope":
            return _longrope(section, width, context, original)
    return None


def _llama3(section: Fields, original: int | None) -> dict[str, Any]:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if original is None:
        raise section.missing("original_max_position_embeddings")
    if low >= high:
        raise section.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return {
        "type": "llama3",
        "factor": section.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_context": original,
    }


def _yarn(section: Fields, original: int) -> dict[str, Any]:
    factor = section.number("factor")
    scaling = {"type": "yarn", "factor": factor, "original_context": original}
    for key in ("beta_fast", "beta_slow"):
        value = section.optional_number(key)
        if value is not None:
            scaling[key] = value
    if section.flag("truncate") is False:
        scaling["truncate"] = False
    magnitude = section.optional_number("attention_factor")
    if magnitude is None:
        weight = section.optional_number("mscale")
        weight_of_all = section.optional_number("mscale_all_dim")
        if (weight is None) != (weight_of_all is None):
            raise section.error("mscale and mscale_all_dim have a meaning only together")
        if weight is not None and weight_of_all is not None:
            magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_of_all)
    if magnitude is not None:
        scaling["magnitude"] = magnitude
    return scaling


def _longrope(section: Fields, width: int, context: int, original: int | None) -> dict[str, Any]:
    if original is None:
        raise section.missing("original_max_position_embeddings")
    stretch = context / original
    factor = section.optional_number("factor")
    if factor is None:
        factor = stretch
    elif stretch not in (1.0, factor):
        raise section.error(
            f"factor is {factor}, but max_position_embeddings is {stretch} times the original"
        )
    if original < 2:
        raise section.error("original_max_position_embeddings must be above 1")
    magnitude = section.optional_number("attention_factor")
    return {
        "type": "longrope",
        "short_factors": _numbers(section, "short_factor", width // 2),
        "long_factors": _numbers(section, "long_factor", width // 2),
        "original_context": original,
        "magnitude": longrope_magnitude(factor, original) if magnitude is None else magnitude,
    }


def rope_from_gguf(
    fields: Fields,
    own: str,
    weights: WeightFile,
    head_dim: int,
    context: int,
    *,
    layout: Layout = "half",
    layers: Sequence[int] | None = None,
) -> EncodingSpec:
    """From the metadata under `own` ("llama.") and the tensors ROPE_TENSORS.

    As llama.cpp reads them: absent keys have a meaning there.
    """
    base = fields.number(own + "rope.freq_base")
    width = fields.optional_integer(own + "rope.dimension_count", head_dim) or head_dim
    scaling = _scaling_in_gguf(fields, own + "rope.scaling.", context)
    lists = weights.names() & ROPE_TENSORS
    if lists:
        if scaling is not None:
            raise fields.error(f"{min(lists)} and rope.scaling.type contradict each other")
        scaling = _scaling_in_tensors(fields, own + "rope.scaling.", weights, width, context)
    elif fields.text(own + "rope.scaling.type") == "longrope":
        raise fields.error("rope_factors_long.weight is missing")
    return rope_spec(fields, base, width, layout=layout, scaling=scaling, layers=layers)


def _scaling_in_gguf(fields: Fields, own: str, context: int) -> dict[str, Any] | None:
    kind = fields.text(own + "type")
    fields.flag(own + "finetuned")  # history: it changes nothing
    # Written even where no scaling is.
    original = fields.optional_integer(own + "original_context_length", MAX_CONTEXT) or context
    if kind in ("none", "longrope"):
        return None  # a factor stays unread, and is refused
    if kind not in (None, "linear", "yarn"):
        raise fields.error(f"rope.scaling.type {shown(kind)} is not supported")
    factor = fields.optional_number(own + "factor")
    if kind is None and factor is None:
        return None
    if factor is None:
        raise fields.missing(own + "factor")
    if kind != "yarn":
        return {"type": "linear", "factor": factor}
    scaling = {"type": "yarn", "factor": factor, "original_context": original}
    for key in ("beta_fast", "beta_slow"):
        value = fields.optional_number(f"{own}yarn_{key}")
        if value is not None:
            scaling[key] = value
    if fields.optional_number(own + "yarn_ext_factor") not in (None, 1.0):
        raise fields.error("rope.scaling.yarn_ext_factor other than 1 is not supported")
    magnitude = fields.optional_number(own + "attn_factor")
    if magnitude is not None:
        scaling["magnitude"] = yarn_magnitude(factor) * magnitude
    return scaling


def _scaling_in_tensors(
    fields: Fields, own: str, weights: WeightFile, width: int, context: int
) -> dict[str, Any]:
    short, long = "rope_factors_short.weight", "rope_factors_long.weight"
    names = weights.names() & ROPE_TENSORS
    if names == {"rope_freqs.weight"}:
        return {
            "type": "factors",
            "factors": _tensor(fields, weights, "rope_freqs.weight", width // 2),
        }
    if names != {short, long}:
        raise fields.error(f"{', '.join(sorted(names))} alone do not say how to rotate")
    magnitude = fields.optional_number(own + "attn_factor")
    return {
        "type": "longrope",
        "short_factors": _tensor(fields, weights, short, width // 2),
        "long_factors": _tensor(fields, weights, long, width // 2),
        "original_context": fields.optional_integer(own + "original_context_length", MAX_CONTEXT)
        or context,
        "magnitude": 1.0 if magnitude is None else magnitude,
    }


def _tensor(fields: Fields, weights: WeightFile, name: str, count: int) -> list[float]:
    if weights.shape(name) != (count,):
        raise fields.error(f"{name} has the shape {list(weights.shape(name))}, not [{count}]")
    return _positive(fields, name, weights.read(name).tolist())


def _numbers(section: Fields, key: str, count: int) -> list[float]:
    """As many numbers above 0 as there are pairs."""
    value = section.get(key)
    if value is None:
        raise section.missing(key)
    if not isinstance(value, list) or len(value) != count:
        raise section.error(f"{key} must be a list of {count} numbers, one for each pair")
    return _positive(section, key, value)


def _positive(fields: Fields, name: str, values: Sequence[object]) -> list[float]:
    found = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise fields.error(f"{name} must hold numbers above 0")
        found.append(float(value))
    return found


def _agreed(section: Fields, key: str, elsewhere: float | None) -> float | None:
    value = section.optional_number(key)
    if None not in (value, elsewhere) and value != elsewhere:
        raise section.error(f"{key} is {value} here but {elsewhere} elsewhere in the file")
    return elsewhere if value is None else value


def _agreed_integer(section: Fields, key: str, elsewhere: int | None) -> int | None:
    value = section.optional_integer(key, MAX_CONTEXT)
    if None not in (value, elsewhere) and value != elsewhere:
        raise section.error(f"{key} is {value} here but {elsewhere} elsewhere in the file")
    return elsewhere if value is None else value
