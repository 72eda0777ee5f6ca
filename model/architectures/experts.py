"""How descriptions tell of experts: counts in both formats, and the names of their tensors."""

from dataclasses import replace

from ropewalk.model.architectures import stored
from ropewalk.model.architectures.common import Most
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import Experts

HUGGING_FACE = replace(
    stored.HUGGING_FACE,
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)
GGUF = replace(
    stored.GGUF,
    router="ffn_gate_inp",
    gate="ffn_gate_exps",
    up="ffn_up_exps",
    down="ffn_down_exps",
)


def from_hf(fields: Fields, *counts: str, normalized: bool) -> Experts:
    """counts: the keys of how many there are; the last has a default."""
    stated = {key: fields.optional_integer(key, Most.EXPERTS) for key in counts}
    found = {count for count in stated.values() if count is not None}
    if len(found) > 1:
        raise fields.error(f"{' and '.join(counts)} differ")
    return _checked(
        fields,
        found.pop() if found else fields.integer(counts[-1], Most.EXPERTS),
        fields.integer("num_experts_per_tok", Most.EXPERTS),
        normalized,
    )


def from_gguf(fields: Fields, own: str, *, normalized: bool) -> Experts:
    """own: what the family's keys begin with."""
    return _checked(
        fields,
        fields.integer(own + "expert_count", Most.EXPERTS),
        fields.integer(own + "expert_used_count", Most.EXPERTS),
        normalized,
    )


def _checked(fields: Fields, count: int, used: int, normalized: bool) -> Experts:
    if used > count:
        raise fields.error(f"a token cannot use {used} of {count} experts")
    return Experts(count, used, normalized)
