"""Pictures of encodings with a bias: the bias of each head, and its effect on scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model.encodings.base import KeyBias, TableBias
from ropewalk.model.formatting import listed
from ropewalk.model.inspect.explain.subject import Subject, Weights
from ropewalk.report.figure import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SKY,
    Omitted,
    Picture,
    axes_row,
    label_bottoms,
    label_ends,
    looks,
    one_axes,
)

LONGEST = 4096
FLOOR = -16.0  # lower biases make weights below e^-16, one in nine million
LABELLED = 8  # heads at most
WIDE = 3.29  # 5% to 95% of a standard normal

BIASES, SCORES = "Bias by distance, per head", "Score by distance"
STEPPED = 200  # a bias with fewer distinct values is drawn in steps
EXACT = 256  # distances up to here are drawn one by one


@dataclass(frozen=True, slots=True)
class Biases:
    """The biases of keys for a query in the middle or at the end of the context."""

    distances: Tensor  # [D], query position - key position
    values: Tensor  # [heads, D] float32
    shifted: bool  # values are relative to distance 0, as softmax allows


def measured(subject: Subject) -> Biases | None:
    bias = subject.encoding.score_bias()
    if bias is None:
        return None
    span = min(subject.context, LONGEST)
    behind = span if isinstance(bias, TableBias) and bias.zero else 0
    distances = torch.arange(-behind + 1 if behind else 0, span)
    query = torch.tensor([span - 1])
    values = bias.between(query, span - 1 - distances)[:, 0].float()
    by_key = isinstance(bias, KeyBias)
    if by_key:
        values = values - values[:, :1]
    return Biases(distances, values, by_key)


def biases(subject: Subject) -> Picture | Omitted:
    found = measured(subject)
    if found is None:
        adds = "what depends on the text" if subject.by_content else "nothing"
        return Omitted("bias", BIASES, f"{subject.title} adds {adds} to the scores.")
    heads = _shown(len(found.values), subject.weights)
    return Picture(
        "bias",
        BIASES,
        _about_biases(found, subject, heads),
        lambda figure: _draw_biases(figure, found, heads),
        height=3.6,
    )


def _about_biases(found: Biases, subject: Subject, shown: Sequence[int]) -> str:
    heads = len(found.values)
    parts = [
        f"The bias that each of {heads} heads adds to the scaled q · k of a key at that distance, "
        "before softmax. It enters neither keys nor values, so no stored entry depends on it, and "
        "a new token changes no bias between older tokens."
    ]
    if len(shown) < heads:
        parts.append(f"Shown are the heads {listed([f'{head}' for head in shown])}.")
    if found.shifted:
        parts.append(
            "The served bias depends on the key's position; shown is its difference from the bias "
            f"at the query's own position, {int(found.distances[-1]):,}, because softmax ignores a "
            "constant that is added to all keys."
        )
    if subject.weights == "drawn":
        parts.append(
            "The values are trained, and no weights are loaded: these are random, so only the "
            "distances at which they change are the encoding's. Use --model to load a checkpoint's."
        )
    last = int(_constant_from(found.values))
    if 0 < last < found.values.shape[1] - 1 and int(found.distances[0]) == 0:
        parts.append(
            f"From distance {last} on, all keys have the same bias, so it needs to be added to "
            "nearer keys only."
        )
    lowest = float(found.values.min())
    if lowest < FLOOR:
        parts.append(
            f"The axis ends at −{-FLOOR:.0f}; the lowest value is −{-lowest:,.0f}. If the biases "
            f"of two keys with equal q · k differ by {-FLOOR:.0f}, their weights have a ratio of "
            "one to nine million."
        )
    return " ".join(parts)


def _constant_from(values: Tensor) -> int:
    """The first column from which on every head's bias equals its last one."""
    differs = (values != values[:, -1:]).any(dim=0)
    return int(differs.nonzero().max()) + 1 if differs.any() else 0


def _draw_biases(figure: Figure | SubFigure, found: Biases, heads: Sequence[int]) -> None:
    axes = one_axes(figure)
    names = [f"head {head}" for head in heads]
    styles = looks(names, names[0])
    values = found.values[list(heads)]
    lowest, highest = float(values.min()), float(values.max())
    margin = 0.05 * (highest - max(lowest, FLOOR)) or 1.0
    floor = max(lowest - margin, FLOOR)
    axes.set_ylim(floor, highest + margin)
    _distance_axis(axes, found.distances)
    axes.set(xlabel="distance (tokens), query − key", ylabel="added to the score (nats)")
    steps = all(len(row.unique()) < STEPPED for row in values)
    at_end, at_bottom = [], []
    for row, (name, look) in zip(values, styles.items(), strict=True):
        axes.plot(
            *_sampled(found.distances, row.clamp(min=2 * FLOOR)),
            color=look.color,
            linestyle=look.dash,
            linewidth=1.4,
            drawstyle="steps-mid" if steps else "default",
        )
        if float(row[-1]) >= floor:
            at_end.append((float(row[-1]), name, look.color))
        else:
            leaves = float(found.distances[(row >= floor).nonzero().max()])
            at_bottom.append((leaves, name, look.color))
    if len({height for height, *_ in at_end}) == 1 < len(at_end):
        at_end = [(at_end[0][0], "all heads", INK)]
    if at_end:
        label_ends(axes, at_end)
    label_bottoms(axes, at_bottom)


def _sampled(distances: Tensor, values: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """All near distances, and enough of the far ones for a logarithmic axis."""
    count = len(distances)
    far = torch.logspace(0, math.log10(count), 300).long().clamp(max=count) - 1
    near = distances.abs() <= EXACT
    near[far] = True
    near[-1] = True
    return distances[near].numpy(), values[near].numpy()


def _shown(heads: int, weights: Weights) -> list[int]:
    """Evenly spread heads; two where the values are random and only their steps matter."""
    count = min(2 if weights == "drawn" else LABELLED, heads)
    return sorted({round(i * (heads - 1) / max(count - 1, 1)) for i in range(count)})


def _distance_axis(axes: Axes, distances: Tensor) -> None:
    """Logarithmic on both sides of 0, which has its own place."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.35)
    axes.set_xlim(float(distances[0]), float(distances[-1]))
    ticks = [tick for tick in (0, *(4**i for i in range(8))) if tick <= int(distances[-1])]
    if distances[0] < 0:
        ticks = [*(-tick for tick in reversed(ticks[1:])), *ticks]
    axes.set_xticks(ticks, [f"{tick:,}".replace("-", "−") for tick in ticks])
    axes.set_xticks([], minor=True)


def scores(subject: Subject) -> Picture | Omitted | None:
    """None when there is no bias."""
    found = measured(subject)
    if found is None:
        return None
    if subject.weights == "drawn":
        return Omitted(
            "score",
            SCORES,
            "How scores depend on distance is trained, and no weights are loaded; use --model to "
            "load a checkpoint's.",
        )
    start = int((found.distances == 0).nonzero())
    values = found.values[:, start:]
    chosen = _chosen(values)
    return Picture(
        "score",
        SCORES,
        _about_scores(values, chosen),
        lambda figure: _draw_scores(figure, values, chosen),
    )


def _chosen(values: Tensor) -> list[int]:
    """The heads with the lowest, the middle and the highest bias on average, if they differ."""
    order = values.clamp(min=FLOOR).mean(dim=1).argsort().tolist()
    chosen: list[int] = []
    for head in (order[0], order[len(order) // 2], order[-1]):
        if not any(torch.equal(values[head], values[other]) for other in chosen):
            chosen.append(head)
    return chosen


def _about_scores(values: Tensor, chosen: list[int]) -> str:
    told = []
    for head in chosen:
        below = values[head] < values[head, 0] - WIDE
        apart = torch.nonzero(~below).max() + 1 if not bool(below.all()) else torch.tensor(0)
        told.append(
            f"in head {head} from distance {int(apart):,} on"
            if int(apart) < values.shape[1]
            else f"in head {head} at no distance up to {values.shape[1] - 1:,}"
        )
    return (
        "Random content: q · k / √head_dim of independent standard normal vectors has mean 0 and "
        "standard deviation 1 at every distance, so the mean score is the bias, and the envelope "
        "(5% to 95%) lies 1.64 to either side; each dot is one random key, the dashed line the "
        "lower end of the band at distance 0. Content can outweigh distance where bands overlap. "
        f"The whole band is below that of distance 0 {', '.join(told)}."
    )


def _draw_scores(figure: Figure | SubFigure, values: Tensor, chosen: list[int]) -> None:
    panels = axes_row(figure, len(chosen), sharey=True)
    distances = torch.arange(values.shape[1])
    generator = torch.Generator().manual_seed(0)
    for axes, head in zip(panels, chosen, strict=True):
        at, mean = _sampled(distances, values[head].clamp(min=2 * FLOOR))
        drawn = mean + torch.randn(len(mean), generator=generator).numpy()
        axes.plot(at, drawn, ".", color=GREY, markersize=2, zorder=1)
        axes.fill_between(at, mean - WIDE / 2, mean + WIDE / 2, color=SKY, alpha=0.35, linewidth=0)
        axes.plot(at, mean, color=BLUE)
        axes.axhline(float(mean[0]) - WIDE / 2, color=ORANGE, linestyle="--", linewidth=1)
        _distance_axis(axes, distances)
        axes.set(title=f"head {head}", xlabel="distance (tokens)")
    panels[0].set_ylabel("score (nats)")
    shown = values[chosen]
    panels[0].set_ylim(max(float(shown.min()) - 4, FLOOR), float(shown.max()) + 4)
