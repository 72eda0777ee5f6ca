"""Pictures of encodings that rotate queries and keys: angles, and scores by distance."""

import math

import numpy as np
import torch
from matplotlib import ticker
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ropewalk.cache.types import KeyStorage
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.encodings.common.rotary import Far
from ropewalk.model.inspect.explain.rotating import (
    PairRotation,
    bound,
    envelope,
    equal_vectors,
    find_pair_rotation,
    random_scores,
)
from ropewalk.model.inspect.explain.subject import Subject
from ropewalk.report.figure import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    Omitted,
    Picture,
    axes_row,
    count_axis,
    draw_map,
    draw_spread,
    label_ends,
)

SHOWN = 128  # positions in the map of angles
LONGEST = 4096  # distances in the pictures of scores
RANDOM = 1000  # pairs of vectors
NEAR = 32
FALLEN = 0.95  # a single pair's cosines, which never fall, differ by less
STORED = {
    KeyStorage.ABSOLUTE: "A key is rotated once, by its own position, before it is stored",
    KeyStorage.RAW: "Keys are stored unrotated, and attention rotates them in every step",
    KeyStorage.BLOCK: "A key is rotated by its offset within its block before it is stored, and "
    "attention adds the rest in every step",
}

ANGLES, SCORES = "Angle by dimension and position", "Score by distance"


def angles(subject: Subject) -> Picture | Omitted:
    if not subject.rotates:
        return Omitted(
            "angle",
            ANGLES,
            f"{subject.title} rotates neither queries nor keys, so there are no angles.",
        )
    found = find_pair_rotation(subject.encoding, subject.config, subject.context)
    if found is None:
        return Omitted(
            "angle",
            ANGLES,
            f"{subject.title} changes queries and keys, but not by rotating pairs of coordinates "
            "by a fixed angle per position that is the same in every head, so no pair has an angle "
            "to show.",
        )
    return Picture(
        "angle",
        ANGLES,
        _about_angles(found, subject),
        lambda figure: _draw_angles(figure, found, subject.context),
    )


def _about_angles(found: PairRotation, subject: Subject) -> str:
    turns = 2 * math.pi / found.speeds.abs()
    slow = int((turns > subject.context).sum())
    (a, b), (c, d) = found.pairs[0], found.pairs[-1]
    parts = [
        "Each pair of coordinates of every query and key is rotated by the position times the "
        f"pair's speed. Pair 0 is coordinates {a} and {b}, pair {len(turns) - 1} is {c} and {d}. "
        f"Left: the cosine of the angle. Right: positions in one full turn, {turns[0]:,.2f} for "
        f"the fastest pair and {turns[-1]:,.0f} for the slowest."
    ]
    far, last = _far(subject.encoding), subject.context - 1
    most = last if far is None else int(far.queries[last] - far.keys[0])
    if slow:
        parts.append(
            f"{slow} of {len(turns)} pairs make no full turn within the context of "
            f"{subject.context:,}"
            + (": in them, every distance has a different angle." if most == last else ".")
        )
    else:
        parts.append(f"Every pair makes a full turn within the context of {subject.context:,}.")
    if found.still:
        parts.append(f"{found.still} of {subject.config.head_dim} coordinates are not rotated.")
    if abs(found.magnitude - 1) > 1e-4:
        parts.append(
            f"Rotated coordinates are also scaled by {found.magnitude:.4f}, so their scores are "
            f"scaled by {found.magnitude**2:.4f}."
        )
    left = subject.encoding.rotation()
    parts.append(
        f"{STORED[left.storage if left else KeyStorage.ABSOLUTE]}. The base sets the speeds, not "
        "how many tokens can be told apart."
    )
    if far is not None and most < last:
        parts.append(
            f"Keys {far.start:,} or more positions before a query are rotated otherwise: the "
            f"farthest as if it were {most:,} positions back instead of {last:,}."
        )
    return " ".join(parts)


def _draw_angles(figure: Figure | SubFigure, found: PairRotation, context: int) -> None:
    left, right = axes_row(figure, 2, gridspec_kw={"width_ratios": [1.25, 1]})
    count = len(found.speeds)
    shown = min(SHOWN, context)
    cosines = torch.cos(found.speeds[:, None] * torch.arange(shown))
    draw_map(left, cosines.numpy(), 1, count, ticks=[-1, 0, 1])
    left.set(title="cosine of the angle", xlabel="position (tokens)", ylabel="pair of coordinates")
    left.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))

    turns = (2 * math.pi / found.speeds.abs()).numpy()
    right.plot(np.arange(count), turns, color=BLUE, marker="o", markersize=2.5, linewidth=1)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,.0f}"))
    right.yaxis.set_minor_formatter(ticker.NullFormatter())
    right.axhline(context, color=ORANGE, linewidth=1.2, linestyle="--")
    right.text(0, context * 1.15, f"context: {context:,}", color=ORANGE, va="bottom", fontsize=8.5)
    right.set(title="positions in one full turn", xlabel="pair of coordinates")
    right.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))


def scores(subject: Subject) -> Picture | Omitted | None:
    """None when the hook is not used: then other pictures cover scores."""
    if not subject.rotates:
        return None
    config, span = subject.config, min(subject.context, LONGEST)
    found = find_pair_rotation(subject.encoding, config, subject.context)
    if found is None:
        return Omitted(
            "score",
            SCORES,
            f"{subject.title} does not rotate pairs at fixed speeds that are the same in every "
            "head, so its scores may depend on more than the distance.",
        )
    distances = _rotated_by(subject.encoding, torch.arange(span))
    equal = equal_vectors(found, config.head_dim, distances)
    factor = bound(found, distances)
    drawn = random_scores(found, config.head_dim, distances, RANDOM)
    return Picture(
        "score",
        SCORES,
        _about_scores(equal, factor, drawn),
        lambda figure: _draw_scores(figure, equal, factor, drawn),
        height=3.3,
    )


def _rotated_by(encoding: PositionalEncoding, distances: Tensor) -> Tensor:
    """The distances that scores have angles of, for a query at the last of `distances`."""
    far = _far(encoding)
    if far is None:
        return distances
    at = len(distances) - 1
    others = far.queries[at] - far.keys[at - distances]
    return torch.where(distances >= far.start, others, distances)


def _far(encoding: PositionalEncoding) -> Far | None:
    left = encoding.rotation()
    return None if left is None else left.far


def _about_scores(equal: Tensor, factor: Tensor, drawn: Tensor) -> str:
    span = len(equal)
    near = min(NEAR, max(1, span // 2))
    peaks = drawn.argmax(dim=1)
    nearest, farthest = (
        float(inside.float().mean()) for inside in (peaks < near, peaks >= span - near)
    )
    mean, limit = "it does not fall on the whole", "It does not fall on the whole here, and"
    if _falls(equal):
        mean = f"it falls on the whole, but rises in {_rises(equal):.0%} of single steps"
    if _falls(factor):
        limit = (
            f"It rises in {_rises(factor):.0%} of steps. That it falls on the whole is seen, not "
            "proved, and"
        )
    return (
        f"Left: the mean of q · k over random q = k, as a share of |q| |k|; {mean}. The envelope "
        "is the largest magnitude from each distance on. Middle: RoFormer (arXiv 2104.09864, "
        "section 3.4.3) derives an upper bound of the score: shown is the bound's factor that "
        f"depends on distance, as a share of its value at 0. {limit} says nothing of the score "
        "itself. Right: q and k drawn independently; their scores have the same spread at every "
        "distance. Of "
        f"{len(drawn):,} such pairs, {nearest:.1%} score highest within the nearest {near} of "
        f"{span:,} distances, and {farthest:.1%} within the farthest {near}. On average both ends "
        f"get the same, and more than their share of {near / span:.1%}, because peaks beyond an "
        "end count there. So closer words do not in general score higher: how distance "
        "affects a model's scores depends on its trained weights."
    )


def _falls(values: Tensor) -> bool:
    """Whether the farthest quarter is, on average, clearly smaller than the nearest values."""
    quarter = -(-len(values) // 4)
    near, far = values[: min(NEAR, quarter)], values[-quarter:]
    return bool(far.abs().mean() < FALLEN * near.abs().mean())


def _rises(values: Tensor) -> float:
    return float((values[1:] > values[:-1]).double().mean())


def _draw_scores(figure: Figure | SubFigure, equal: Tensor, factor: Tensor, drawn: Tensor) -> None:
    left, middle, right = axes_row(figure, 3)
    x = np.arange(1, len(equal))
    above = envelope(equal)
    left.axhline(0, color=GREY, linewidth=0.8)
    left.plot(x, above[1:].numpy(), color=ORANGE, linestyle="--")
    left.plot(x, equal[1:].numpy(), color=BLUE, linewidth=1.1)
    left.set(title="equal random vectors", ylabel="q · k / (|q| |k|)")
    left.text(0.97, 0.95, "envelope", color=ORANGE, transform=left.transAxes, ha="right", va="top")
    left.text(0.97, 0.86, "mean", color=BLUE, transform=left.transAxes, ha="right", va="top")

    middle.plot(x, (factor[1:] / factor[0]).numpy(), color=INK, linewidth=1.1)
    middle.set(title="RoFormer's upper bound", ylabel="share of its value at distance 0")
    middle.set_ylim(0, None)

    ends = draw_spread(right, drawn.numpy(), examples=2)
    right.set(title="independent random vectors", ylabel="q · k / √head_dim")
    for axes in (left, middle, right):
        axes.set_xscale("log")
        axes.set(xlabel="distance (tokens)", xlim=(1, len(equal) - 1))
        count_axis(axes)
    label_ends(right, ends)
