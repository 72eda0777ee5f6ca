"""What the figures say about common claims: each sentence follows from numbers alone.

The claims are those of reference texts on extrapolation (arXiv 2108.12409 for all but NoPE) and
on how fast RoPE is learnt. A finding that differs is called one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from model.family.evaluation.curves import Point, before_decay, reached
from model.family.evaluation.losses import LossBin
from model.family.evaluation.results import Measured
from model.family.evaluation.words import interval, listed, millions, signed

HOLDS = 0.05  # nats per token that distance may cost
BREAKS = 1.0  # nats per token from which a text is no longer understood
STEP = 0.05  # to which a loss that is to be reached is rounded up


class Beyond(StrEnum):
    """What a model does past its trained length."""

    REFUSES = "refuses"
    HOLDS = "holds"
    DEGRADES = "degrades"
    BREAKS = "breaks"
    OPEN = "is not decided"  # an interval reaches to both sides of HOLDS, and none past it


PUBLISHED = {  # more than one where how fast it gets worse is a matter of size and training
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
    first: LossBin | None  # from which on it costs more than HOLDS for certain


def shipped(members: Sequence[Measured]) -> list[Measured]:
    """The models that are served, without those of other seeds."""
    return [one for one in members if one.seed is None]


def verdict(measured: Measured) -> Verdict | None:
    """None where nothing was measured past the trained length."""
    losses = measured.losses
    if losses is None:
        return None
    if losses.refusal and losses.reach <= losses.trained:
        return Verdict(Beyond.REFUSES, None, None)
    far = [one for one in losses.bins if one.change is not None]
    if not far:
        return None
    costs = [one.change for one in far if one.change is not None]
    if any(cost.low > BREAKS or math.isnan(cost.value) for cost in costs):
        kind = Beyond.BREAKS
    elif any(cost.low > HOLDS for cost in costs):
        kind = Beyond.DEGRADES
    else:
        kind = Beyond.HOLDS if all(cost.high <= HOLDS for cost in costs) else Beyond.OPEN
    bins = list(zip(far, costs, strict=True))
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
    """With what was published; None where nothing was, or nothing is decided."""
    if label not in PUBLISHED or beyond is Beyond.OPEN:
        return None
    return beyond in PUBLISHED[label]


def differing(members: Sequence[Measured]) -> list[str]:
    """Labels of the models that do something else past the trained length than was published."""
    found = {one.label: verdict(one) for one in shipped(members)}
    return [
        label
        for label, own in found.items()
        if own is not None and _agrees(label, own.beyond) is False
    ]


@dataclass(frozen=True, slots=True)
class Speed:
    """Where an encoding's trainings first had the common loss; one point for each seed."""

    label: str
    points: tuple[Point, ...]

    def tokens(self) -> tuple[int, int]:
        """Of the first and of the last seed that was there."""
        found = [point.tokens for point in self.points]
        return min(found), max(found)

    def minutes(self) -> float:
        """The mean of the seeds."""
        return sum(point.seconds for point in self.points) / len(self.points) / 60


def alike(members: Sequence[Measured]) -> list[tuple[int, list[Measured]]]:
    """Those with curves by the tokens of their training, most first.

    Rates, and the pieces that texts are read in, follow from how many tokens there will be: step
    by step, a training is compared only with others of as many.
    """
    groups: dict[int, list[Measured]] = {}
    for one in members:
        if one.curve is not None and one.curve.trained:
            groups.setdefault(one.curve.tokens, []).append(one)
    return sorted(groups.items(), reverse=True, key=lambda group: group[0])


def speeds(members: Sequence[Measured]) -> tuple[float, list[Speed]]:
    """The lowest training loss that all of these, trained alike, came to before their rates
    fell, and when each first had it.

    Fastest first; empty when there are no curves.
    """
    curves = [(one.label, one.curve) for one in members if one.curve and before_decay(one.curve)]
    if not curves:
        return math.nan, []
    lowest = max(min(point.loss for point in before_decay(curve)) for _, curve in curves)
    loss = math.ceil(lowest / STEP) * STEP
    found: dict[str, list[Point]] = {}
    for label, curve in curves:
        point = reached(curve, loss)
        assert point is not None, "every curve came so low"
        found.setdefault(label, []).append(point)
    made = [Speed(label, tuple(points)) for label, points in found.items()]
    return loss, sorted(made, key=lambda speed: sum(speed.tokens()))


def about_speed(members: Sequence[Measured]) -> str:
    """Whether RoPE converges faster: among trainings of as many tokens, by the range of seeds."""
    said, first, seeds = [], True, 0
    for tokens, own in alike(members):
        loss, found = speeds(own)
        rope = next((speed for speed in found if speed.label == "rope"), None)
        others = [speed for speed in found if speed.label != "rope"]
        if rope is None or not others:
            continue
        low, high = rope.tokens()
        later = [one.label for one in others if one.tokens()[0] > high]
        earlier = [one.label for one in others if one.tokens()[1] < low]
        near = [one.label for one in others if one.label not in (*later, *earlier)]
        when = millions(low) if low == high else f"{millions(low)} to {millions(high)}"
        count = len(rope.points)
        said.append(
            f"With {millions(tokens)} tokens, RoPE first had a training loss of {loss:.2f} nats "
            f"after {when} ({count} {'seed' if count == 1 else 'seeds'})."
        )
        groups = ("Later", later), ("Earlier", earlier), ("Not told apart from it", near)
        said += [f"{where}: {listed(labels)}." for where, labels in groups if labels]
        fastest = min(found, key=Speed.minutes)
        said.append(
            f"By the clock {fastest.label} was first, after {fastest.minutes():.1f} minutes; "
            f"RoPE took {rope.minutes():.1f}."
        )
        first, seeds = first and not earlier and not near, seeds + count
    if not said:
        return "Whether RoPE converges faster: not measured."
    if first:
        said.append("So here RoPE converged faster than every other encoding, per token.")
    else:
        said.append("So RoPE converging faster than all others is not what these trainings show.")
    if seeds == 1:
        said.append("One seed says little: a second one may change the order.")
    return " ".join(said)
