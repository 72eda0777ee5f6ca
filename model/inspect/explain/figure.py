"""The style of pictures: colours, type, and labels at the ends of lines.

Needs no display, no style file of the user's and no font but the one that comes with matplotlib.
Knows no encodings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

WIDTH = 9.6  # inches
TEXT = 0.06  # width of a label, in widths of the axes
GAP = 0.075  # between labels at the end of lines, in heights of the axes
# Distinct in lightness too, so that they work in grey and for the colour-blind (Okabe, Ito).
INK, BLUE, ORANGE, SKY, GREY = "#1a1a1a", "#0f5c9c", "#c2560c", "#6db3e2", "#8a8a8a"
FORMAT_STYLES: dict[str, dict[str, Any]] = {
    "bf16": {"color": ORANGE, "linestyle": "-", "marker": "o"},
    "fp16": {"color": BLUE, "linestyle": "--", "marker": "s"},
    "fp32": {"color": INK, "linestyle": ":", "marker": "^"},
}
MAP = "cividis"  # even steps of lightness, also for the colour-blind
SETTINGS: Any = {  # the names are checked by matplotlib when they are set
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """`draw` fills an empty figure; `caption` describes it."""

    key: str
    title: str
    caption: str
    draw: Callable[[Figure | SubFigure], None]
    height: float = 3.2  # inches


@dataclass(frozen=True, slots=True)
class Omitted:
    """A picture that does not apply, and why."""

    key: str
    title: str
    reason: str


@contextmanager
def own_settings() -> Iterator[None]:
    """matplotlib's defaults plus ours, whatever the user's own files say."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def one_axes(figure: Figure | SubFigure) -> Axes:
    (axes,) = axes_row(figure, 1)
    return axes


def axes_row(figure: Figure | SubFigure, count: int, **ratios: Any) -> list[Axes]:
    """Axes side by side; `width_ratios` if they differ in width."""
    return list(figure.subplots(1, count, squeeze=False, **ratios)[0])


def label_ends(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Text right of the axes at each height (data units), spread where labels would touch.

    labels: (height, text, colour). Call once the limits are final.
    """
    low, high = sorted(axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted(labels, key=lambda label: label[0])
    heights = [float(to_axes.transform((1, min(max(at, low), high)))[1]) for at, *_ in ordered]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + GAP)
    excess = max(0.0, heights[-1] - 1)
    for height, (_, text, color) in zip(heights, ordered, strict=True):
        axes.text(
            1.015,
            height - excess,
            text,
            color=color,
            transform=axes.transAxes,
            va="center",
            fontsize=8.5,
        )


def label_bottoms(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Text left of where lines leave the axes at the bottom, in rows where labels would touch.

    labels: (place in data units, text, colour). Call once the limits are final.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    rows: list[float] = []  # how far each row is occupied
    for place, text, color in sorted(labels):
        at = float(to_axes.transform((place, axes.get_ylim()[0]))[0]) - 0.014
        row = next((i for i, end in enumerate(rows) if at - TEXT >= end), len(rows))
        rows[row : row + 1] = [at]
        height = 0.02 + row * GAP
        # Lines bend to the left on their way up.
        axes.text(
            at - 0.12 * height,
            height,
            text,
            color=color,
            transform=axes.transAxes,
            ha="right",
            fontsize=8.5,
        )


def count_axis(axes: Axes) -> None:
    """Ticks for positions and distances, written out: 1,024 rather than 10^3."""
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
