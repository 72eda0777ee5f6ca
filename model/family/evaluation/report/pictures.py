"""Pictures of an evaluation, with the same colour and marker for an encoding in all of them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from ropewalk.model.family.evaluation.curves import Curve, Point
from ropewalk.model.family.evaluation.losses import LossBin, Losses
from ropewalk.model.family.evaluation.recalled import Recalls
from ropewalk.model.family.evaluation.report.findings import shipped
from ropewalk.model.family.evaluation.results import Measured
from ropewalk.model.family.texts.recall import KINDS
from ropewalk.report.figure import GREY, INK, Picture, axes_row, count_axis, label_ends, looks
from ropewalk.report.statistics import Estimate

NAMES = ("rope", "t5", "alibi", "learned", "sinusoidal")  # whose looks are the same everywhere
BAND = 0.12  # opacity of an interval
ASIDE = 0.035  # offset between encodings' error bars, in powers of e
FAR = 1.5  # nats: costs up to this are drawn on a linear scale
SKIPPED = 0.02  # fraction of a training that may lie above the picture


def look(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: fixed for the six encodings, assigned in turn to others."""
    found = looks([*dict.fromkeys((*NAMES, "nope", *labels))], "nope")[label]
    return found.color, found.marker


def pictures(members: Sequence[Measured]) -> list[Picture]:
    """The pictures for which there are figures. Keys are used in file names."""
    labels = list(dict.fromkeys(one.label for one in members))
    served = shipped(members)
    made = []
    if losses := {one.label: one.losses for one in served if one.losses}:
        draw = partial(_draw_losses, losses=losses, labels=labels)
        made.append(Picture("loss", "Loss by position", "", draw, height=4.0))
    if recalls := {one.label: one.recalls for one in served if one.recalls and one.recalls.cells}:
        draw = partial(_draw_recalls, recalls=recalls, labels=labels)
        made.append(Picture("recall", "Recall by distance", "", draw, height=5.6))
    curves = [(one.label, one.curve) for one in members if one.curve and one.curve.trained]
    if curves:
        draw = partial(_draw_training, curves=curves, labels=labels)
        made.append(Picture("training", "Training", "", draw, height=3.8))
    if any(one.divergences for one in served):
        draw = partial(_draw_operations, members=served, labels=labels)
        made.append(Picture("operations", "Answers after cache operations", "", draw, height=2.8))
    return made


def _draw_losses(
    figure: Figure | SubFigure, losses: dict[str, Losses], labels: Sequence[str]
) -> None:
    """Left: every position. Right: the cost of distance past the trained length."""
    far = any(one.change for own in losses.values() for one in own.bins)
    whole, *costs = axes_row(figure, 2 if far else 1)
    trained = max(own.trained for own in losses.values())
    whole.set_title("Nats per token")
    _draw_bins(whole, losses, labels, lambda one: one.loss)
    whole.axvline(trained, color=GREY, linestyle=":", linewidth=1)
    _positions(whole, "position")
    if not costs:
        return
    (cost,) = costs
    cost.set_title("More than from the nearest tokens alone, nats")
    every = [one.change for own in losses.values() for one in own.bins if one.change is not None]
    found = [each for each in every if math.isfinite(each.low + each.high)]
    reached = 1.5 * max((max(abs(each.low), abs(each.high)) for each in found), default=0.0)
    if reached > FAR:
        cost.set_yscale("symlog", linthresh=0.1)
        cost.yaxis.set_major_formatter("{x:g}")
    cost.set_ylim(min([-0.1, *(1.5 * each.low for each in found)]), max(reached, 0.1))
    if not found:  # nothing to choose the axis by
        cost.set_xlim(trained, max(one.stop for own in losses.values() for one in own.bins))
    _draw_bins(cost, losses, labels, lambda one: one.change)
    cost.axhline(0, color=GREY, linewidth=1)
    _positions(cost, f"position, past the {trained:,} trained")


def _draw_bins(
    axes: Axes,
    losses: dict[str, Losses],
    labels: Sequence[str],
    of: Callable[[LossBin], Estimate | None],
) -> None:
    """A line with its band for each encoding, over the bins that have the figure."""
    ends = []
    for label, own in losses.items():
        color, marker = look(label, labels)
        found = {one: each for one in own.bins if (each := of(one)) is not None}
        if not found:
            ends.append((0.0, f"{label}: refuses", color))
            continue
        # On a logarithmic axis.
        middle = [math.sqrt(max(one.start, 1) * one.stop) for one in found]
        axes.plot(middle, [each.value for each in found.values()], color=color, marker=marker)
        low, high = zip(*((each.low, each.high) for each in found.values()), strict=True)
        axes.fill_between(middle, low, high, color=color, alpha=BAND, lw=0)
        ends.append((_last(list(found.values())), label, color))
    label_ends(axes, ends)


def _last(estimates: Sequence[Estimate]) -> float:
    """Height of a line's end: the line breaks off where values are not finite."""
    return next((one.value for one in reversed(estimates) if math.isfinite(one.value)), 0.0)


def _positions(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    count_axis(axes)
    axes.set_xlabel(title)


def _draw_recalls(
    figure: Figure | SubFigure, recalls: dict[str, Recalls], labels: Sequence[str]
) -> None:
    """A row per kind, a column per length."""
    cells = [cell for own in recalls.values() for cell in own.cells]
    lengths = sorted({cell.length for cell in cells})
    grid = figure.subplots(len(KINDS), len(lengths), squeeze=False, sharex=True, sharey=True)
    for kind, row in zip(KINDS, grid, strict=True):
        for length, axes in zip(lengths, row, strict=True):
            ends = []
            for place, (label, own) in enumerate(recalls.items()):
                color, marker = look(label, labels)
                mine = [one for one in own.cells if (one.kind, one.length) == (kind, length)]
                mine.sort(key=lambda one: one.distance)
                if not mine:
                    ends.append((0.0, f"{label}: refuses", color))
                    continue
                aside = np.exp(ASIDE * (place - (len(recalls) - 1) / 2))
                values = [one.share.value for one in mine]
                low = [one.share.value - one.share.low for one in mine]
                high = [one.share.high - one.share.value for one in mine]
                axes.errorbar(
                    [one.distance * aside for one in mine],
                    values,
                    yerr=(np.maximum(low, 0), np.maximum(high, 0)),
                    color=color,
                    marker=marker,
                    elinewidth=0.8,
                    linewidth=1.2,
                )
                ends.append((values[-1], label, color))
            axes.set_ylim(-0.05, 1.05)
            axes.set_title(f"{kind}, {length:,} tokens")
            _positions(axes, "tokens back" if kind == KINDS[-1] else "")
            label_ends(axes, ends)
        row[0].set_ylabel("share of answers that are right")


def _draw_training(
    figure: Figure | SubFigure, curves: Sequence[tuple[str, Curve]], labels: Sequence[str]
) -> None:
    """Loss by tokens and by minutes; dotted where an encoding has a longer training."""
    by_tokens, by_time = axes_row(figure, 2)
    longest: dict[str, Curve] = {}
    for label, curve in curves:
        if label not in longest or curve.tokens > longest[label].tokens:
            longest[label] = curve
    highest = max(own.trained[int(len(own.trained) * SKIPPED)].loss for own in longest.values())
    scales: Sequence[tuple[Axes, str, Callable[[Point], float]]] = (
        (by_tokens, "tokens", lambda point: point.tokens / 1e6),
        (by_time, "minutes", lambda point: point.seconds / 60),
    )
    for axes, unit, along in scales:
        ends = []
        for label, curve in curves:
            color, _ = look(label, labels)
            style = "-" if curve.tokens == longest[label].tokens else ":"
            where = [along(point) for point in curve.trained]
            losses = [point.loss for point in curve.trained]
            axes.plot(where, losses, color=color, linewidth=1.2, linestyle=style)
            if curve is longest[label]:
                ends.append((losses[-1], label, color))
        axes.set_ylim(top=highest)
        axes.set_xlabel("million tokens" if unit == "tokens" else "minutes")
        axes.set_title(f"Training loss by {unit}, nats per token")
        label_ends(axes, ends)


def _draw_operations(
    figure: Figure | SubFigure, members: Sequence[Measured], labels: Sequence[str]
) -> None:
    """A column per operation, a row per encoding."""
    known = [one for one in members if one.divergences]
    names = list(
        dict.fromkeys((own.operation, own.times) for one in known for own in one.divergences or ())
    )
    row = axes_row(figure, len(names), sharex=True, sharey=True)
    for (operation, times), axes in zip(names, row, strict=True):
        axes.set_title(operation if times == 1 else f"{operation}, {times} times")
        for place, one in enumerate(known):
            color, marker = look(one.label, labels)
            for own in one.divergences or ():
                if (own.operation, own.times) != (operation, times):
                    continue
                if (value := own.divergence) is None:
                    style: Any = {"ha": "center", "va": "center", "color": INK, "fontsize": 8.5}
                    at = axes.get_yaxis_transform()
                    axes.text(0.5, place, "refused", transform=at, **style)
                    continue
                sides = ([max(value.value - value.low, 0)], [max(value.high - value.value, 0)])
                axes.errorbar(value.value, place, xerr=sides, color=color, marker=marker)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("KL, nats")
    row[0].set_yticks(range(len(known)), [one.label for one in known])
    row[0].set_ylim(len(known) - 0.5, -0.5)
