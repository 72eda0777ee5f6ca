"""Training as its log tells it: loss by tokens and by seconds. Reads log.jsonl, no weights."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from model.family.errors import FamilyError

STEPS = 20  # whose mean is a point: as many in every curve, so that all are as smooth


@dataclass(frozen=True, slots=True)
class Point:
    """After so many tokens and seconds of training. Nats per token."""

    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Curve:
    """`trained`: loss of the training windows, each the mean of the steps up to it.

    level: tokens before the rates fell, which lowers the loss at once; trainings of several
    lengths are compared up to there.
    """

    steps: int
    level: int
    trained: tuple[Point, ...]
    held_out: tuple[Point, ...]


def read(log: Path) -> Curve:
    """Raises FamilyError when a line is none of a training's."""
    steps: list[Point] = []
    held_out: list[Point] = []
    rates: list[float] = []
    for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if "loss" in row:
                steps.append(_point(row, "loss"))
                rates.append(float(row.get("rate", 1.0)))
            if "held_out_loss" in row:
                held_out.append(_point(row, "held_out_loss"))
        except (ValueError, KeyError, TypeError) as error:
            raise FamilyError(
                f"{log}, line {number}, is no step of a training; remove the file or train anew"
            ) from error
    falling = next((n for n, (one, two) in enumerate(pairwise(rates)) if two < one), -1)
    level = steps[falling].tokens if steps else 0
    return Curve(len(steps), level, _thinned(steps), tuple(held_out))


def _point(row: dict[str, Any], name: str) -> Point:
    return Point(int(row["tokens"]), float(row["seconds"]), float(row[name]))


def _thinned(steps: Sequence[Point]) -> tuple[Point, ...]:
    groups = [steps[start : start + STEPS] for start in range(0, len(steps), STEPS)]
    return tuple(
        Point(own[-1].tokens, own[-1].seconds, sum(one.loss for one in own) / len(own))
        for own in groups
    )


def before_decay(curve: Curve) -> tuple[Point, ...]:
    """Training losses before the rates fell."""
    return tuple(point for point in curve.trained if point.tokens <= curve.level)


def reached(curve: Curve, loss: float) -> Point | None:
    """Where the training loss first was so low before the rates fell; None when it never was."""
    return next((point for point in before_decay(curve) if point.loss <= loss), None)


def band(
    curves: Sequence[Curve], along: Callable[[Point], float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where, and the lowest loss there, that of the longest training, and the highest.

    A shorter training counts up to where its rates fell.
    """
    most = max(curve.trained[-1].tokens for curve in curves)
    whole = [curve for curve in curves if curve.trained[-1].tokens == most]
    counted = [curve.trained for curve in whole]
    counted += [points for curve in curves if curve not in whole if (points := before_decay(curve))]
    x = np.array([along(point) for point in whole[0].trained])
    losses = np.stack(
        [
            np.interp(x, [along(p) for p in points], [p.loss for p in points], right=np.nan)
            for points in counted
        ]
    )
    line = np.array([point.loss for point in whole[0].trained])
    return x, np.nanmin(losses, axis=0), line, np.nanmax(losses, axis=0)
