"""Training curves from logs: loss by tokens and by seconds. Reads log.jsonl, no weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ropewalk.model.family.errors import FamilyError

HELD_UP = 2.0  # median step times: longer steps waited for something else
STEPS = 20  # steps averaged per point: the same for every curve, so that all are equally smooth


@dataclass(frozen=True, slots=True)
class Point:
    """Nats per token after that many tokens and seconds of training."""

    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Curve:
    """`trained`: loss on training windows; each point is the mean of the steps up to it."""

    steps: int
    trained: tuple[Point, ...]
    held_out: tuple[Point, ...]

    @property
    def tokens(self) -> int:
        """Of the whole training."""
        return self.trained[-1].tokens if self.trained else 0


def read(log: Path) -> Curve:
    """Raises FamilyError when a line is not a step of a training."""
    rows: list[Point] = []  # seconds as they were
    held_out: dict[int, float] = {}  # by row
    for number, line in enumerate(log.read_text(encoding="utf-8").splitlines()):
        try:
            row = json.loads(line)
            rows.append(Point(int(row["tokens"]), float(row["seconds"]), float(row["loss"])))
            if row.get("held_out_loss") is not None:
                held_out[number] = float(row["held_out_loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise FamilyError(
                f"{log}, line {number + 1}, is not a training step; remove the file or train again"
            ) from error
    times = _not_held_up([row.seconds for row in rows])
    steps = [replace(row, seconds=at) for row, at in zip(rows, times, strict=True)]
    seen = tuple(replace(steps[number], loss=loss) for number, loss in held_out.items())
    return Curve(len(steps), _thinned(steps), seen)


def _not_held_up(seconds: Sequence[float]) -> list[float]:
    """The times with every step longer than HELD_UP medians shortened to the median."""
    taken = np.diff(seconds, prepend=0.0)
    if len(taken):
        usual = np.median(taken)
        taken[taken > HELD_UP * usual] = usual
    return [float(each) for each in np.cumsum(taken)]


def _thinned(steps: Sequence[Point]) -> tuple[Point, ...]:
    groups = [steps[start : start + STEPS] for start in range(0, len(steps), STEPS)]
    return tuple(
        Point(own[-1].tokens, own[-1].seconds, sum(one.loss for one in own) / len(own))
        for own in groups
    )
