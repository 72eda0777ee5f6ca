"""Findings on common claims: every sentence is derived from the figures alone.

The claims are those of reference texts on extrapolation (arXiv 2108.12409 for all but NoPE). A
finding that contradicts them is marked as such.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from ropewalk.model.family.evaluation.losses import LossBin
from ropewalk.model.family.evaluation.report.words import interval, signed
from ropewalk.model.family.evaluation.results import Measured

HOLDS = 0.05  # nats per token that distance may cost
BREAKS = 1.0  # nats per token above which a text is no longer understood


class Beyond(StrEnum):
    """What a model does past its trained length."""

    REFUSES = "refuses"
    HOLDS = "holds"
    DEGRADES = "degrades"
    BREAKS = "breaks"
    OPEN = "is not decided"  # some interval contains HOLDS, and none lies above it


PUBLISHED = {  # several where the severity depends on size and training
    "learned": (Beyond.REFUSES,),
    "sinusoidal": (Beyond.BREAKS,),
    "rope": (Beyond.DEGRADES, Beyond.BREAKS),
    "alibi": (Beyond.HOLDS,),
    "t5": (Beyond.HOLDS,),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worst`: the bin beyond the trained length in which distance costs most."""

    beyond: Beyond
    worst: LossBin | None
    first: LossBin | None  # from here on, all intervals lie above HOLDS


def shipped(members: Sequence[Measured]) -> list[Measured]:
    """The served models, without those of other seeds."""
    return [one for one in members if one.seed is None]


def verdict(measured: Measured) -> Verdict | None:
    """None where nothing was measured past the trained length."""
    losses = measured.losses
    if losses is None:
        return None
    if losses.refusal and losses.reach <= losses.trained:
        return Verdict(Beyond.REFUSES, None, None)
    bins = [(one, one.change) for one in losses.bins if one.change is not None]
    if not bins:
        return None
    costs = [cost for _, cost in bins]
    if any(cost.low > BREAKS or math.isnan(cost.value) for cost in costs):
        kind = Beyond.BREAKS
    elif any(cost.low > HOLDS for cost in costs):
        kind = Beyond.DEGRADES
    else:
        kind = Beyond.HOLDS if all(cost.high <= HOLDS for cost in costs) else Beyond.OPEN
    worst, _ = max(bins, key=lambda one: math.inf if math.isnan(one[1].value) else one[1].value)
    certain = list(takewhile(lambda one: one[1].low > HOLDS, reversed(bins)))
    return Verdict(kind, worst, certain[-1][0] if certain else None)


def about_length(measured: Measured) -> str:
    """One sentence: what happens past the trained length, and whether that is as published."""
    found = verdict(measured)
    if found is None:
        return f"{measured.label}: not measured past the trained length."
    assert measured.losses is not None
    said = f"{measured.label} {found.beyond.value}"
    if found.beyond is Beyond.REFUSES:
        said += f" past {measured.losses.reach:,} tokens: it has no more positions"
    elif found.worst is not None and found.worst.change is not None:
        cost = f"{signed(found.worst.change.value)} nats per token"
        where = f"positions {found.worst.start:,} to {found.worst.stop:,}"
        said += f": at worst {cost} ({interval(found.worst.change)}) at {where}"
        if found.first is not None:
            said += f", and more than {HOLDS} from position {found.first.start:,} on"
    return f"{said}. {_compared(measured.label, found.beyond)}".rstrip()


def _compared(label: str, beyond: Beyond) -> str:
    agrees = _agrees(label, beyond)
    if agrees is None:
        return ""
    if agrees:
        return "That is as published."
    return f"**This differs from the literature**, by which it {PUBLISHED[label][0].value}."


def _agrees(label: str, beyond: Beyond) -> bool | None:
    """Whether it is as published; None if nothing was published, or it is undecided."""
    if label not in PUBLISHED or beyond is Beyond.OPEN:
        return None
    return beyond in PUBLISHED[label]


def differing(members: Sequence[Measured]) -> list[str]:
    """Labels of models that past the trained length do not behave as published."""
    found = {one.label: verdict(one) for one in shipped(members)}
    return [
        label
        for label, own in found.items()
        if own is not None and _agrees(label, own.beyond) is False
    ]
