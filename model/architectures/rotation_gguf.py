"""RoPE's settings as GGUF states them: some in the metadata, some in small tensors.

Read as by llama.cpp, where absent keys have a meaning. What would change the answers and is not
understood is refused. Knows no particular family.
"""

import math
from collections.abc import Sequence
from typing import Any

from ropewalk.model.architectures.common import LLAMA_CPP, Most
from ropewalk.model.architectures.fields import Absent, Default, Fields
from ropewalk.model.architectures.rotation import positive_numbers, rope_spec, stretched
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.common.rope_scaling import yarn_magnitude
from ropewalk.model.weights.base import WeightFile, shown

# Tensors that are read as settings, not as weights.
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
)
ROTATED_IN_GGUF: Absent = {
    "rope.freq_base": Default(10000.0, LLAMA_CPP),
    "rope.scaling.factor": Default(1.0, LLAMA_CPP),  # where rope.scaling.type asks for one
}


def rope_from_gguf(
    fields: Fields,
    own: str,
    weights: WeightFile,
    head_dim: int,
    context: int,
    *,
    layers: Sequence[int] | None = None,
) -> EncodingSpec:
    """From the metadata under `own` ("llama.") and the tensors ROPE_TENSORS."""
    base = fields.number(own + "rope.freq_base")
    width = fields.optional_integer(own + "rope.dimension_count", head_dim) or head_dim
    scaling = _scaling_in_gguf(fields, own + "rope.", context)
    lists = weights.names() & ROPE_TENSORS
    if lists:
        if scaling is not None:
            raise fields.error(f"{min(lists)} and rope.scaling.type contradict each other")
        scaling = _scaling_in_tensors(fields, own + "rope.scaling.", weights, width, context)
    elif fields.text(own + "rope.scaling.type") == "longrope":
        raise fields.error("rope_factors_long.weight is missing")
    return rope_spec(fields, base, width, scaling=scaling, layers=layers)


def trained_context_in_gguf(fields: Fields, own: str, encoding: EncodingSpec, context: int) -> int:
    """Positions the model was trained for. context: context_length."""
    stated = fields.get(own + "rope.scaling.original_context_length") is not None
    return stretched(encoding, context) if stated else context


def _scaling_in_gguf(fields: Fields, own: str, context: int) -> dict[str, Any] | None:
    kind = fields.text(own + "scaling.type")
    fields.flag(own + "scaling.finetuned")  # provenance: changes nothing
    # Written even without a scaling.
    original = fields.optional_integer(own + "scaling.original_context_length", Most.CONTEXT)
    if kind in ("none", "longrope"):
        return None  # a factor would stay unread and be refused
    if kind not in (None, "linear", "yarn"):
        raise fields.error(f"rope.scaling.type {shown(kind)} is not supported")
    factor = fields.optional_number(own + "scaling.factor")
    older = fields.optional_number(own + "scale_linear")  # counts where there is no newer one
    factor = older if factor is None else factor
    if factor is None and kind is None:
        return None
    if factor is None:
        factor = fields.number(own + "scaling.factor")
    if kind != "yarn":
        return None if factor == 1 else {"type": "linear", "factor": factor}
    scaling = {"type": "yarn", "factor": factor, "original_context": original or context}
    for key in ("beta_fast", "beta_slow"):
        value = fields.optional_number(f"{own}scaling.yarn_{key}")
        if value is not None:
            scaling[key] = value
    if fields.optional_number(own + "scaling.yarn_ext_factor") not in (None, 1.0):
        raise fields.error("rope.scaling.yarn_ext_factor other than 1 is not supported")
    # transformers' attention_factor, which llama.cpp's converter writes and llama.cpp replaces.
    usual, stated = yarn_magnitude(factor), fields.optional_number(own + "scaling.yarn_attn_factor")
    if stated is not None and not math.isclose(stated, usual, rel_tol=1e-6):
        raise fields.error(f"rope.scaling.yarn_attn_factor other than {usual:.4f} is not supported")
    magnitude = fields.optional_number(own + "scaling.attn_factor")
    if magnitude is not None:
        scaling["magnitude"] = usual * magnitude
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
        raise fields.error(f"{', '.join(sorted(names))} alone do not define a rotation")
    magnitude = fields.optional_number(own + "attn_factor")
    return {
        "type": "longrope",
        "short_factors": _tensor(fields, weights, short, width // 2),
        "long_factors": _tensor(fields, weights, long, width // 2),
        "original_context": fields.optional_integer(own + "original_context_length", Most.CONTEXT)
        or context,
        "magnitude": 1.0 if magnitude is None else magnitude,
    }


def _tensor(fields: Fields, weights: WeightFile, name: str, count: int) -> list[float]:
    if weights.shape(name) != (count,):
        raise fields.error(f"{name} has the shape {list(weights.shape(name))}, not [{count}]")
    return positive_numbers(fields, name, weights.read(name).tolist())
