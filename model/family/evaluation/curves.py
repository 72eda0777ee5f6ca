"""Training as its log tells it: loss by tokens and by seconds. Reads log.jsonl, no weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.family.errors import FamilyError

POINTS = 200  # of a curve, at most: each the mean of as many steps as any


@dataclass(frozen=True, slots=True)
class Point:
    """After so many tokens and seconds of training. Nats per token."""

    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Curve:
    """`trained`: loss of the training windows, each the mean of the steps up to it."""

    steps: int
    trained: tuple[Point, ...]
    held_out: tuple[Point, ...]


def read(log: Path) -> Curve:
    """Raises FamilyError when a line is none of a training's."""
    steps: list[Point] = []
    held_out: list[Point] = []
    for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if "loss" in row:
                steps.append(_point(row, "loss"))
            if "held_out_loss" in row:
                held_out.append(_point(row, "held_out_loss"))
        except (ValueError, KeyError, TypeError) as error:
            raise FamilyError(
                f"{log}, line {number}, is no step of a training; remove the file or train anew"
            ) from error
    return Curve(len(steps), _thinned(steps), tuple(held_out))


def _point(row: dict[str, Any], name: str) -> Point:
    return Point(int(row["tokens"]), float(row["seconds"]), float(row[name]))


def _thinned(steps: Sequence[Point]) -> tuple[Point, ...]:
    each = -(-len(steps) // POINTS) or 1
    groups = [steps[start : start + each] for start in range(0, len(steps), each)]
    return tuple(
        Point(own[-1].tokens, own[-1].seconds, sum(one.loss for one in own) / len(own))
        for own in groups
    )


def reached(curve: Curve, loss: float) -> Point | None:
    """Where the training loss first was so low; None when it never was."""
    return next((point for point in curve.trained if point.loss <= loss), None)
