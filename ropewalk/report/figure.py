"""How all pictures look. Knows nothing of what is drawn.

matplotlib is loaded when the first picture is drawn. It needs no display, no style file of the
user's and no font but its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Name → colour on a light page, on a dark one. The arms' are Okabe and Ito's, distinct in lightness
# too, and darkened or lightened to a contrast of 3:1 on their page.
THEME: Mapping[str, tuple[str, str]] = {
    "page": ("#ffffff", "#14161a"),
    "ink": ("#1b1d21", "#e6e8ec"),
    "soft": ("#5d6570", "#9aa3af"),
    "line": ("#d5d9df", "#363b44"),
    "a0": ("#30343b", "#e6e8ec"),
    "a1": ("#0b6bab", "#5aaef0"),
    "a2": ("#c8500a", "#ff8b4d"),
    "a3": ("#00845f", "#35c296"),
    "a4": ("#a8458a", "#e68cc4"),
    "a5": ("#9a7200", "#e0b020"),
    "a6": ("#3d9ad1", "#a5d8fa"),
    "a7": ("#7b7f87", "#9aa0aa"),
}
PAGE, INK, SOFT, LINE, *ARMS = (light for light, _ in THEME.values())
BLUE, ORANGE, SKY, GREY = ARMS[1], ARMS[2], ARMS[6], ARMS[7]
MARKERS = ("o", "s", "^", "D", "X", "v", "P", "p")
DASHES: Sequence[Any] = ("-", (0, (4, 2)), (0, (1.2, 1.8)), (0, (5, 2, 1.2, 2)), (0, (8, 2.5)))
MAP = "cividis"  # even steps of lightness, also for the colour-blind
WIDTH = 9.6  # inches
SMALL, MARK = 8.5, 6.0  # points, of labels and of marks with a label beside
SETTINGS: Any = {  # the names are checked by matplotlib when they are set
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "xtick.bottom": False,
    "ytick.color": SOFT,
    "ytick.left": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "butt",
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "figure.facecolor": PAGE,
    "axes.facecolor": "none",
}
TOLD = "told:"  # begins the id of what has a tooltip


@dataclass(frozen=True, slots=True)
class Look:
    """How an arm is drawn everywhere in a report."""

    color: str
    marker: str
    dash: Any


@dataclass(frozen=True, slots=True)
class Picture:
    """`draw` fills an empty figure; `caption` describes it."""

    key: str
    title: str
    caption: str
    draw: "Callable[[Figure | SubFigure], None]"
    height: float = 3.2  # inches
    width: float = WIDTH
    data: Mapping[str, float] = field(default_factory=dict)  # for a page's script
    placed: bool = False  # `draw` places its axes; else they are laid out with their labels


@dataclass(frozen=True, slots=True)
class Omitted:
    """A picture that does not apply, and why."""

    key: str
    title: str
    reason: str


@contextmanager
def own_settings(seed: str = "") -> Iterator[None]:
    """matplotlib's defaults plus ours, whatever the user's own files say; `seed` is of SVG ids."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS | {"svg.hashsalt": seed})
        yield


def looks(labels: Sequence[str], baseline: str | None) -> dict[str, Look]:
    """Colour, marker and dash of each label; only the baseline has the colour of text."""
    others = [label for label in labels if label != baseline]
    found = {
        label: Look(ARMS[1 + i % 7], MARKERS[(1 + i) % 8], DASHES[i % 5])
        for i, label in enumerate(others)
    }
    if baseline is not None:
        found[baseline] = Look(ARMS[0], MARKERS[0], DASHES[0])
    return {label: found[label] for label in labels}


def render(picture: Picture) -> "Figure":
    """The picture as a figure. Call within `own_settings`, as whatever saves it."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = None if picture.placed else ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(picture.width, picture.height), layout=layout)
    picture.draw(figure)
    return figure


def tell(artist: Any, words: str) -> None:
    """Make `words` the tooltip of what was drawn."""
    artist.set_gid(TOLD + words)


def one_axes(figure: "Figure | SubFigure") -> "Axes":
    (axes,) = axes_row(figure, 1)
    return axes


def axes_row(figure: "Figure | SubFigure", count: int, **ratios: Any) -> "list[Axes]":
    """Axes side by side; `width_ratios` if they differ in width."""
    return list(figure.subplots(1, count, squeeze=False, **ratios)[0])


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to `wanted`, which ascend, that are `gap` apart, within [low, high]."""
    blocks: list[list[float]] = []  # that move together: those who would touch
    for i, at in enumerate(wanted):
        blocks.append([at - i * gap])
        while len(blocks) > 1 and fmean(blocks[-1]) < fmean(blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    high -= gap * (len(wanted) - 1)
    placed = [max(low, min(fmean(block), high)) for block in blocks for _ in block]
    return [at + i * gap for i, at in enumerate(placed)]


def draw_spread(axes: "Axes", drawn: np.ndarray, examples: int) -> list[tuple[float, str, str]]:
    """Draw the mean of curves [curves, distances], its spread and some of them, from distance 1 on.

    Returns labels for `label_ends`.
    """
    x = range(1, drawn.shape[1])
    low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    mean = drawn.mean(axis=0)
    axes.fill_between(x, low[1:], high[1:], color=SKY, alpha=0.35, linewidth=0)
    for one in drawn[:examples]:
        axes.plot(x, one[1:], color=GREY, linewidth=0.6)
    axes.plot(x, mean[1:], color=BLUE)
    ends = ((high, "95%", SKY), (mean, "mean", BLUE), (low, "5%", SKY))
    return [(float(curve[-1]), label, color) for curve, label, color in ends]


def draw_map(axes: "Axes", values: np.ndarray, reach: float, down: int, **bar: Any) -> None:
    """Draw values [rows, positions] between -reach and reach as colours, with their scale.

    down: where the last row ends on the axis, if rows are left out. bar: of the colour bar.
    """
    extent = (-0.5, values.shape[1] - 0.5, down - 0.5, -0.5)
    image = axes.imshow(
        values,
        aspect="auto",
        cmap=MAP,
        vmin=-reach,
        vmax=reach,
        interpolation="nearest",
        extent=extent,
    )
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, pad=0.02, **bar).outline.set_visible(False)


def label_ends(
    axes: "Axes", ends: Sequence[tuple[float, str, str]], markers: Sequence[str] = ()
) -> None:
    """Text right of the axes at each height (data units), spread where labels would touch.

    ends: (height, text, colour). With `markers`, one for each end, the text is in ink beside its
    marker, and a thin line joins the two. Call once the limits are final.
    """
    low, high = sorted(axes.get_ylim())
    place = sorted(range(len(ends)), key=lambda i: ends[i][0])
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [to_axes.transform((1, min(max(ends[i][0], low), high)))[1] for i in place]
    lines = max(text.count("\n") + 1 for _, text, _ in ends)
    gap = lines * SMALL * 1.3 / 72 / (axes.bbox.height / axes.figure.dpi)
    for i, at, height in zip(place, wanted, spread(wanted, gap, 0.0, 1.0), strict=True):
        _, text, color = ends[i]
        style: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        if markers:
            axes.plot([1.0, 1.03], [at, height], color=SOFT, linewidth=0.6, **style)
            axes.plot([1.05], [height], markers[i], color=color, markersize=MARK, **style)
        left = (1.075, INK) if markers else (1.015, color)
        axes.text(left[0], height, text, color=left[1], va="center", fontsize=SMALL, **style)


def label_bottoms(axes: "Axes", labels: Sequence[tuple[float, str, str]]) -> None:
    """Text left of where lines leave the axes at the bottom, in rows where labels would touch.

    labels: (place in data units, text, colour). Call once the limits are final.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    wide, tall = 0.06, 0.075  # of a label, in sizes of the axes
    rows: list[float] = []  # how far each row is occupied
    for place, text, color in sorted(labels):
        at = float(to_axes.transform((place, axes.get_ylim()[0]))[0]) - 0.014
        row = next((i for i, end in enumerate(rows) if at - wide >= end), len(rows))
        rows[row : row + 1] = [at]
        height = 0.02 + row * tall
        left = at - 0.12 * height  # lines bend to the left on their way up
        style: Any = {"color": color, "ha": "right", "fontsize": SMALL}
        axes.text(left, height, text, transform=axes.transAxes, **style)


def count_axis(axes: "Axes") -> None:
    """Ticks for positions and distances, written out: 1,024 rather than 10^3."""
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.xaxis.set_minor_formatter("")
