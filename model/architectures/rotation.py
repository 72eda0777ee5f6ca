"""RoPE's settings as config.json states them, in both spellings; partly shared with GGUF.

They mean what transformers computes from them, and what it does not compute with is told in the
log. A setting that it does not know either, or that contradicts another, is refused, because
ignoring it could change the answers. Knows descriptions, no particular family.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ropewalk.model.architectures.common import FULL, TRANSFORMERS, Most
from ropewalk.model.architectures.fields import Fields, Like, by
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.common.rope_scaling import longrope_magnitude, yarn_magnitude
from ropewalk.model.encodings.common.rotary import Layout
from ropewalk.model.weights.base import shown

# Names of frequency tables that old checkpoints store beside the weights.
TABLE = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
ORIGINAL = "original_max_position_embeddings"
# What it means that a required key is absent.
ROTATED = by(
    TRANSFORMERS,
    rope_theta=10000.0,
    original_max_position_embeddings=Like("max_position_embeddings"),
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
    """The encoding with options that differ from the defaults. Raises CheckpointError."""
    if width % 2:
        raise fields.error(f"{width} coordinates cannot be rotated in pairs")
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
    older: tuple[str, str] | None = None,
    partly: bool = True,
    known: Collection[str] = (),
) -> EncodingSpec:
    """From `rope_theta` and `rope_scaling`, or `rope_parameters` in newer files.

    context: max_position_embeddings. kinds: the family's names for types of scaling → ours.
    older: the family's former names for rope_theta and partial_rotary_factor. partly: whether the
    latter may be less than 1. transformers rotates whole heads of some families whatever it says,
    and other programs do not, so it is refused there. known: further keys of a section, which the
    family reads.
    """
    theta, part = older or ("rope_theta", "partial_rotary_factor")
    base = _agreed(fields, theta, fields.optional_number("rope_theta"))
    share = _agreed(fields, part, fields.optional_number("partial_rotary_factor"))
    original = fields.optional_integer(ORIGINAL, Most.CONTEXT)
    sections, stated = [], set()
    for key in ("rope_parameters", "rope_scaling"):
        section = fields.section(key)
        if section is None:
            continue
        kind = _kind(section, kinds)
        base = _agreed(section, "rope_theta", base)
        share = _agreed(section, "partial_rotary_factor", share)
        original = _agreed_integer(section, ORIGINAL, original)
        sections.append((section, kind))
        stated |= set() if kind is None else {kind}
    if len(stated) > 1:
        raise fields.error("rope_parameters and rope_scaling have different types")
    # Only now, when every spelling has been looked at, it is absent.
    if base is None:
        base = fields.number(theta)
    if share is None and fields.defines(part):
        share = fields.number(part)
    if share is not None and share > 1:
        raise fields.error(f"partial_rotary_factor must be at most 1, not {share}")
    if share not in (None, 1.0) and not partly and "proportional" not in stated:
        raise fields.error(f"partial_rotary_factor {share} is not supported for this family")
    width = head_dim if share is None else int(head_dim * share) or 1
    if original is None and stated & {"llama3", "yarn", "longrope"}:
        original = fields.integer(ORIGINAL, Most.CONTEXT, absent=context)
    found: list[dict[str, Any]] = []
    for section, kind in sections:
        section.flag("finetuned")  # tells who trained it, and changes nothing
        scaling = _scaling(section, kind or "default", width, context, original or context)
        section.finish(known.__contains__)
        if scaling is not None and scaling not in found:
            found.append(scaling)
    if len(found) > 1:
        raise fields.error("rope_parameters and rope_scaling differ")
    scaling = found[0] if found else None
    if scaling is not None and scaling["type"] == "proportional":
        # Here the share selects frequencies of the whole head; it does not narrow the rotation.
        width, scaling["share"] = head_dim, share or 1.0
    return rope_spec(fields, base, width, scaling=scaling, layers=layers)


def trained_context(fields: Fields, encoding: EncodingSpec, context: int) -> int:
    """Positions the model was trained for. context: max_position_embeddings."""
    newer = fields.section("rope_parameters")
    of_kind = None if newer is None else newer.section(FULL)
    sections = (fields, newer, of_kind, fields.section("rope_scaling"))
    stated = any(part is not None and part.get(ORIGINAL) is not None for part in sections)
    return stretched(encoding, context) if stated else context


def stretched(encoding: EncodingSpec, context: int) -> int:
    """`context`, or what YaRN makes of the original one, if that is more.

    Files with YaRN may state the length before or after, so the original must be stated besides.
    """
    scaling = encoding.options.get("scaling")
    if scaling is None or scaling["type"] != "yarn":
        return context
    return max(context, int(min(scaling["original_context"] * scaling["factor"], Most.CONTEXT)))


def _kind(section: Fields, kinds: Mapping[str, str]) -> str | None:
    """The type, in either spelling; None when it is not given."""
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
    section: Fields, kind: str, width: int, context: int, original: int
) -> dict[str, Any] | None:
    """The scaling of one section. Its `finish` later refuses parameters that were not read."""
    match kind:
        case "linear":
            if original != context:
                section.assume(
                    f"a linear scaling does not use the original {original} (transformers)"
                )
            return {"type": "linear", "factor": section.number("factor")}
        case "proportional":
            factor = section.optional_number("factor")
            return {"type": "proportional", "factor": 1.0 if factor is None else factor}
        case "dynamic":
            if original != context:
                section.assume(
                    "a dynamic scaling starts from max_position_embeddings, "
                    f"not from the original {original} (transformers)"
                )
            factor = section.number("factor")
            return {"type": "dynamic", "factor": factor, "original_context": context}
        case "llama3":
            return _llama3(section, original)
        case "yarn":
            return _yarn(section, context, original)
        case "longrope":
            return _longrope(section, width, context, original)
    return None


def _llama3(section: Fields, original: int) -> dict[str, Any]:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return {
        "type": "llama3",
        "factor": section.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_context": original,
    }


def _yarn(section: Fields, context: int, original: int) -> dict[str, Any]:
    section.require("factor")
    factor = section.optional_number("factor")
    if factor is None:
        factor = context / original
        section.assume(f"factor is null, which means {factor} (transformers)")
    scaling = {"type": "yarn", "factor": factor, "original_context": original}
    for key in ("beta_fast", "beta_slow"):
        value = section.optional_number(key, zero_is_none=True)
        if value is not None:
            scaling[key] = value
    if section.flag("truncate") is False:
        scaling["truncate"] = False
    magnitude = section.optional_number("attention_factor")
    weight = section.optional_number("mscale", zero_is_none=True)
    weight_of_all = section.optional_number("mscale_all_dim", zero_is_none=True)
    ignored = {"mscale": weight, "mscale_all_dim": weight_of_all}
    if magnitude is None and weight is not None and weight_of_all is not None:
        magnitude = yarn_magnitude(factor, weight) / yarn_magnitude(factor, weight_of_all)
        ignored = {}
    if magnitude is not None:
        scaling["magnitude"] = magnitude
    ignored["attn_factor"] = section.optional_number("attn_factor", zero_is_none=True)
    for key, value in ignored.items():
        if value is not None:
            section.assume(f"{key} = {value} is without effect here (transformers)")
    return scaling


def _longrope(section: Fields, width: int, context: int, original: int) -> dict[str, Any]:
    stretch = context / original
    factor = section.optional_number("factor")
    if factor is None:
        factor = stretch
    elif stretch not in (1.0, factor):
        section.assume(
            f"factor {factor} counts, though max_position_embeddings is {stretch} times the "
            "original (transformers)"
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


def _numbers(section: Fields, key: str, count: int) -> list[float]:
    """One number above 0 for each pair."""
    value = section.get(key)
    if value is None:
        raise section.missing(key)
    if not isinstance(value, list) or len(value) != count:
        raise section.error(f"{key} must be a list of {count} numbers, one for each pair")
    return positive_numbers(section, key, value)


def positive_numbers(fields: Fields, name: str, values: Sequence[object]) -> list[float]:
    """The values as floats. Raises CheckpointError when one is not a number above 0."""
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
    value = section.optional_integer(key, Most.CONTEXT)
    if None not in (value, elsewhere) and value != elsewhere:
        raise section.error(f"{key} is {value} here but {elsewhere} elsewhere in the file")
    return elsewhere if value is None else value
