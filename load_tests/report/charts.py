"""Charts: lines, rows of dots or bars, and a timeline. Knows nothing of load tests.

Names are next to their data, and every mark has its numbers as a tooltip. A hollow mark means "no
difference".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.report.figure import (
    INK,
    MARK,
    PAGE,
    SMALL,
    SOFT,
    Look,
    Picture,
    label_ends,
    one_axes,
    tell,
)
from ropewalk.report.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

WIDTH, HEIGHT = 5.3, 3.1  # inches; of a chart with lines
ROW, AROUND = 0.22, 0.65  # of the others: a row, and the rest of the height
_LOGARITHMIC = 30.0  # from this ratio of highest to lowest value a latency axis is logarithmic
_BENT = 15.0  # percent: from this range of differences the axis is bent, or small ones would merge
_BENT_TICKS = (0.0, *(sign * n * 10.0**e for sign in (-1, 1) for e in range(9) for n in (1, 3)))
_LETTER, _SHRINKS = 5.8, 0.6  # points of a letter; of 100 to the inch, less room for names
_ASIDE = 3.0  # points between variants at the same x, so that intervals do not overlap

Tick = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Mark:
    """One measured value with its interval. `told` is the tooltip, `text` ends a row."""

    found: Estimate
    told: str
    text: str = ""
    x: float = 0.0  # on a chart of lines
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """The marks of one variant: a line, or a row, which has one mark but on a timeline."""

    label: str
    look: Look
    marks: Sequence[Mark]


def lines(
    title: str,
    series: Sequence[Series],
    across: str,
    tick: Tick,
    *,
    centred: bool = False,
    free: bool = False,
) -> Picture:
    """Lines through marks with their intervals, each line named at its right end.

    `centred` values are differences from 0, which is drawn as a line. Other y axes begin at 0 or,
    where values differ thirtyfold, are logarithmic. The ticks of the x axis are the x values, or
    round numbers if x is `free`, that is, itself measured.
    """

    def draw(axes: "Axes") -> None:
        from matplotlib.transforms import ScaledTranslation

        marks = [mark for one in series for mark in one.marks]
        _upwards(axes, marks, centred, tick)
        _along(axes, sorted({mark.x for mark in marks}), free)
        for i, one in enumerate(series):
            shift = 0 if free else _ASIDE * (i - (len(series) - 1) / 2)
            aside = axes.transData + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
            x, y = [mark.x for mark in one.marks], [mark.found.value for mark in one.marks]
            style: dict[str, Any] = {"color": one.look.color, "transform": aside, "clip_on": False}
            axes.plot(x, y, linestyle=one.look.dash, linewidth=1.4, **style)
            floor = axes.get_ylim()[0]  # of a logarithmic axis, which may cut intervals
            bars = [
                (mark.x, end)
                for mark in one.marks
                for end in (max(mark.found.low, floor), mark.found.high, math.nan)
            ]
            axes.plot(*zip(*bars, strict=True), linewidth=1.2, **style)
            for mark in one.marks:
                _dot(axes, mark.x, mark.found.value, one, mark, aside)
        ends = [(one.marks[-1].found.value, one.label, one.look.color) for one in series]
        label_ends(axes, ends, [one.look.marker for one in series])
        axes.set_xlabel(across)
        axes.grid(False, axis="x")

    return _chart("lines", title, draw, HEIGHT)


def dots(
    title: str,
    groups: Mapping[str, Sequence[Series]],
    across: str,
    tick: Tick,
    centred: bool = False,
) -> Picture:
    """A dot with its interval for each row, names at the left, under a heading for each group.

    `centred` values are differences from 0, which is drawn as a line.
    """
    rows: list[Series | str] = []
    for name, group in groups.items():
        rows += [name, *group] if name else group
    found = [mark.found for group in groups.values() for row in group for mark in row.marks]
    low, high = min(one.low for one in found), max(one.high for one in found)

    def draw(axes: "Axes") -> None:
        if centred:
            axes.axvline(0, color=SOFT, linestyle="--", linewidth=1)
            _around(axes, "x", low, high)
        else:
            axes.set_xlim(min(low, 0.0), 1.04 * high or 1.0)
            axes.locator_params(axis="x", nbins=5)
        _label(axes, sorted(axes.get_xticks(), key=abs), tick)
        for place, row in enumerate(rows):
            if isinstance(row, str):
                continue
            for mark in row.marks:
                ends, color = [mark.found.low, mark.found.high], row.look.color
                axes.plot(ends, [place, place], color=color, linewidth=1.4, clip_on=False)
                _dot(axes, mark.found.value, place, row, mark, axes.transData)
        _name_rows(axes, rows)
        axes.set_xlabel(across)

    return _chart("dots", title, draw, AROUND + ROW * len(rows))


def bars(title: str, rows: Sequence[Series]) -> Picture:
    """A bar from 0 for each row, its value written at the end: no axis is needed."""

    def draw(axes: "Axes") -> None:
        longest = max(mark.found.value for row in rows for mark in row.marks)
        axes.set_xlim(0, 1.02 * longest or 1.0)
        _bars(axes, rows, lambda found: (0.0, found.value))
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)

    return _chart("bars", title, draw, AROUND - 0.3 + ROW * len(rows))


def timeline(title: str, rows: Sequence[Series], across: str) -> Picture:
    """What each row's marks span, counted from the first start."""
    spans = [mark.found for row in rows for mark in row.marks]
    first, last = min(one.low for one in spans), max(one.high for one in spans)
    least = (last - first) / 400  # or it could not be seen

    def draw(axes: "Axes") -> None:
        _bars(axes, rows, lambda found: (found.low - first, max(found.high - found.low, least)))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(plain)
        axes.set_xlabel(across)

    return _chart("timeline", title, draw, AROUND + ROW * len(rows))


def side_by_side(charts: Sequence[Picture]) -> Picture:
    def draw(figure: "Figure | SubFigure") -> None:
        for part, chart in zip(
            figure.subfigures(1, len(charts), squeeze=False)[0], charts, strict=True
        ):
            chart.draw(part)

    title = "; ".join(chart.title for chart in charts)
    height = max(chart.height for chart in charts)
    return Picture("charts", title, "", draw, height, WIDTH * len(charts))


def plain(value: float, _: object = None) -> str:
    return f"{value:,.10g}"


def _chart(kind: str, title: str, draw: "Callable[[Axes], None]", height: float) -> Picture:
    def fill(figure: "Figure | SubFigure") -> None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
        axes = one_axes(figure)
        axes.grid(clip_on=False)
        draw(axes)

    return Picture(kind, title, "", fill, height, WIDTH)


def _dot(axes: "Axes", x: float, y: float, of: Series, mark: Mark, transform: Any) -> None:
    (dot,) = axes.plot(
        [x],
        [y],
        of.look.marker,
        color=of.look.color,
        markerfacecolor=PAGE if mark.hollow else of.look.color,
        markersize=MARK,
        transform=transform,
        clip_on=False,
        zorder=3,
    )
    tell(dot, f"{of.label}: {mark.told or mark.text}")


def _bars(
    axes: "Axes", rows: Sequence[Series], extent: Callable[[Estimate], tuple[float, float]]
) -> None:
    """A bar for each mark; `extent` is its start and its length."""
    for place, row in enumerate(rows):
        for mark in row.marks:
            start, length = extent(mark.found)
            style: Any = {"color": row.look.color, "linewidth": 0, "clip_on": False}
            (bar,) = axes.barh(place, length, 0.6, start, **style)
            tell(bar, mark.told or f"{row.label}: {mark.text}")
    _name_rows(axes, rows)


def _name_rows(axes: "Axes", rows: Sequence[Series | str]) -> None:
    """Names at the left, texts at the right, and headings in bold; the first row is at the top."""
    axes.set_ylim(len(rows) - 0.4, -0.6)
    names = [row if isinstance(row, str) else row.label for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params("y", length=0, labelcolor=INK)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    for place, (row, name) in enumerate(zip(rows, axes.get_yticklabels(), strict=True)):
        if isinstance(row, str):
            name.set_fontweight("bold")
        else:
            at, text = axes.get_yaxis_transform(), row.marks[-1].text
            axes.text(1.01, place, text, transform=at, va="center", color=SOFT, fontsize=SMALL)


def _along(axes: "Axes", values: Sequence[float], free: bool) -> None:
    """The x axis: its ticks are the values whose labels do not overlap."""
    if free:
        axes.set_xlim(0, 1.04 * values[-1] or 1.0)
        axes.xaxis.set_major_formatter(plain)
        return
    log = values[0] > 0 and values[-1] / values[0] >= 8
    ends = [math.log(values[at]) if log else values[at] for at in (0, -1)]
    margin = 0.06 * (ends[1] - ends[0]) or 0.5
    low, high = ends[0] - margin, ends[1] + margin
    axes.set(xscale="log" if log else "linear")
    axes.set_xlim(*((math.exp(low), math.exp(high)) if log else (low, high)))
    _label(axes, values[::-1], plain)


def _label(axes: "Axes", values: Sequence[float], tick: Tick) -> None:
    """Ticks of the x axis at the values whose labels do not touch that of an earlier one."""
    kept: list[tuple[float, float, float]] = []  # value, place, half of the label's width
    low, high = axes.get_xlim()
    for value in values:
        if not low <= value <= high:
            continue
        at = axes.transData.transform((value, axes.get_ylim()[1]))[0] * _SHRINKS
        half = _LETTER * len(tick(value)) / 2 + 2
        if all(abs(at - place) >= half + other for _, place, other in kept):
            kept.append((value, at, half))
    axes.set_xticks([value for value, *_ in kept], [tick(value) for value, *_ in kept])
    axes.set_xticks([], minor=True)


def _upwards(axes: "Axes", marks: Sequence[Mark], centred: bool, tick: Tick) -> None:
    """The y axis for marks and intervals; a logarithmic one may cut intervals, but no marks."""
    high = max(mark.found.high for mark in marks)
    values = [mark.found.value for mark in marks]
    lowest, highest = min(values), max(values)
    if centred:
        axes.axhline(0, color=SOFT, linestyle="--", linewidth=1)
        _around(axes, "y", min(mark.found.low for mark in marks), high)
    elif lowest > 0 and highest / lowest >= _LOGARITHMIC:
        decades = math.floor(math.log10(lowest)), math.ceil(math.log10(high))
        axes.set(yscale="log", ylim=(10.0 ** decades[0], 10.0 ** decades[1]))
    else:
        axes.set_ylim(0, 1.05 * high or 1.0)
    axes.yaxis.set_major_formatter(lambda at, _: tick(at))
    axes.spines["left"].set_visible(False)


def _around(axes: "Axes", way: Literal["x", "y"], low: float, high: float) -> None:
    """An axis of differences; large ones are compressed, so that small ones are visible."""
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.04 * (high - low) or 1.0
    ends = low - margin, high + margin
    if high - low > _BENT:
        ends = 1.2 * low - 0.2, 1.2 * high + 0.2
        axes.set(**{f"{way}scale": "asinh"})
        axis = axes.xaxis if way == "x" else axes.yaxis
        axis.set_ticks([at for at in _BENT_TICKS if ends[0] <= at <= ends[1]])
        axis.set_ticks([], minor=True)
    axes.set(**{f"{way}lim": ends})
