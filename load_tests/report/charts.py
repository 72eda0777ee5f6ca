"""Charts as inline SVG: lines, rows of dots or bars, and a timeline. Knows nothing of load tests.

Names are next to their data, and every mark has its numbers as a tooltip. A hollow mark means "no
difference".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ropewalk.load_tests.report.svg import (
    CHART_STYLE,
    LIGHT,
    MARGIN,
    WIDTH,
    Look,
    Scale,
    apart,
    bent_ticks,
    color_rules,
    colored,
    colors,
    decades,
    line,
    marker,
    nice,
    polyline,
    rectangle,
    svg,
    text,
    told,
    wide,
)

TOP, BOTTOM, LEFT = 34.0, 46.0, 62.0
HEIGHT = 290.0  # of a chart with lines
ROW = 21.0  # of the others
_LOGARITHMIC = 30.0  # from this ratio of highest to lowest value a latency axis is logarithmic
_BENT = 15.0  # percent: from this range of differences the axis is bent, or small ones would merge
_ASIDE = 3.0  # offset between arms at the same x, so that intervals do not overlap

Tick = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Mark:
    """One measured value with its interval. `told` is the tooltip."""

    x: float
    y: float
    low: float
    high: float
    told: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """The marks of one arm."""

    label: str
    look: Look
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `dots` or `bars`. `text` is written at its end."""

    label: str
    look: Look
    value: float
    low: float
    high: float
    text: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a timeline."""

    label: str
    look: Look
    start: float
    end: float
    told: str


def lines(
    title: str,
    series: Sequence[Series],
    across: str,
    tick: Tick,
    *,
    centred: bool = False,
    free: bool = False,
) -> str:
    """Lines through marks with their intervals, each line named at its right end.

    `centred` values are differences from 0, which is drawn as a line. Other y axes begin at 0 or,
    where values differ thirtyfold, are logarithmic. The ticks of the x axis are the x values, or
    round numbers if x is `free`, that is, itself measured.
    """
    marks = [mark for one in series for mark in one.marks]
    right = WIDTH - 30 - max(wide(one.label) for one in series)
    floor = HEIGHT - BOTTOM
    if free:
        below = nice(0.0, max(mark.x for mark in marks), 4)
        x, aside = Scale(below[0], below[-1], LEFT, right), 0.0
    else:
        x, below = _measured(sorted({mark.x for mark in marks}), right)
        aside = _ASIDE
    y, beside = _upwards(marks, centred, floor)
    parts = [line("grid", LEFT, y(at), right, y(at)) for at in beside]
    parts += [text(tick(at), LEFT - 6, y(at) + 4, "soft", "end") for at in beside]
    if centred:
        parts.append(line("level", LEFT, y(0.0), right, y(0.0)))
    parts += [text(f"{at:,.10g}", x(at), floor + 17, "soft", "middle") for at in below]
    parts.append(text(across, (LEFT + right) / 2, HEIGHT - 8, "soft", "middle"))
    ends: list[tuple[float, float]] = []
    for i, one in enumerate(series):
        shift = aside * (i - (len(series) - 1) / 2)
        places = [(x(mark.x) + shift, y(mark.y)) for mark in one.marks]
        parts.append(_curve(one, places, y))
        ends.append(places[-1])
    return svg(title, HEIGHT, [*parts, *_names(series, ends, right)])


def dots(
    title: str,
    groups: Mapping[str, Sequence[Row]],
    across: str,
    tick: Tick,
    centred: bool = False,
) -> str:
    """A dot with its interval for each row, names at the left, under a heading for each group.

    `centred` values are differences from 0, which is drawn as a line.
    """
    rows = [row for group in groups.values() for row in group]
    left, right = _sides(rows)
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    if centred:
        x, ticks = _around(low, high, left, right)
    else:
        ticks = nice(min(low, 0.0), high, 3)
        x = Scale(ticks[0], ticks[-1], left, right)
    bottom = TOP + ROW * (len(rows) + sum(1 for name in groups if name))
    parts = list(_rulers(ticks, x, bottom, tick))
    if centred:
        parts.append(line("level", x(0.0), TOP - 4, x(0.0), bottom))
    middle = TOP + ROW / 2
    for name, group in groups.items():
        if name:
            parts.append(text(name, MARGIN, middle + 4, "group"))
            middle += ROW
        for row in group:
            interval = line("interval", x(row.low), middle, x(row.high), middle)
            dot = marker(row.look.marker, x(row.value), middle, hollow=row.hollow)
            parts.append(_row(row, middle, interval + dot))
            middle += ROW
    parts.append(text(across, (left + right) / 2, bottom + 34, "soft", "middle"))
    return svg(title, bottom + (42 if across else 24), parts)


def bars(title: str, rows: Sequence[Row]) -> str:
    """A bar from 0 for each row, its value written at the end: no axis is needed."""
    left, right = _sides(rows)
    x = Scale(0.0, max(row.value for row in rows) or 1.0, left, right)
    bottom = TOP + ROW * len(rows)
    parts = [line("grid", left, TOP, left, bottom)]
    for i, row in enumerate(rows):
        middle = TOP + ROW * (i + 0.5)
        length = max(1.5, x(row.value) - left) if row.value else 0.0
        parts.append(_row(row, middle, rectangle(left, middle - 6, length, 12)))
    return svg(title, bottom + 6, parts)


def timeline(title: str, spans: Sequence[Span], across: str) -> str:
    """The spans in time, one row for each label, counted from the first start."""
    labels = list(dict.fromkeys(span.label for span in spans))
    left = MARGIN + 24 + max(map(wide, labels))
    first = min(span.start for span in spans)
    ticks = nice(0.0, max(span.end for span in spans) - first, 4)
    x = Scale(0.0, ticks[-1], left, WIDTH - 16)
    bottom = TOP + ROW * len(labels)
    parts = list(_rulers(ticks, x, bottom, lambda at: f"{at:,.10g}"))
    for i, label in enumerate(labels):
        middle = TOP + ROW * (i + 0.5)
        own = [span for span in spans if span.label == label]
        drawn = [marker(own[0].look.marker, MARGIN + 6, middle)]
        for span in own:
            start, end = x(span.start - first), x(span.end - first)
            block = rectangle(start, middle - 6, max(1.0, end - start - 0.5), 12)
            drawn.append(f"<g>{told(span.told)}{block}</g>")
        parts.append(text(label, MARGIN + 16, middle + 4) + colored(own[0].look, drawn))
    parts.append(text(across, (left + WIDTH - 16) / 2, bottom + 34, "soft", "middle"))
    return svg(title, bottom + 42, parts)


def standalone(charts: Sequence[str]) -> str:
    """Charts side by side as one SVG file, black on white whatever the reader's theme."""
    heights = [float(chart.split('viewBox="0 0 ')[1].split('"')[0].split()[1]) for chart in charts]
    across, down = WIDTH * len(charts), max(heights)
    inside = "\n".join(
        chart.replace("<svg ", f'<svg x="{i * WIDTH:g}" width="{WIDTH:g}" height="{height:g}" ', 1)
        for i, (chart, height) in enumerate(zip(charts, heights, strict=True))
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{across:g}" height="{down:g}"
 viewBox="0 0 {across:g} {down:g}">
<style>
svg {{ --page: #fff; --ink: #1b1d21; --soft: #5d6570; --line: #d5d9df; {colors(LIGHT)} }}
{CHART_STYLE}{color_rules()}
</style>
<rect width="100%" height="100%" style="fill: #fff"/>
{inside}
</svg>
"""


def _measured(values: Sequence[float], right: float) -> tuple[Scale, list[float]]:
    """A scale over measured x values, and the values whose labels do not overlap."""
    log = values[0] > 0 and values[-1] / values[0] >= 8
    around = LEFT + 14, right - 14
    if values[0] == values[-1]:
        return Scale(values[0] - 1, values[0] + 1, *around), [values[0]]
    x = Scale(values[0], values[-1], *around, "log" if log else "linear")
    kept = [values[-1]]
    for at in reversed(values[:-1]):
        room = (wide(f"{at:,.10g}") + wide(f"{kept[0]:,.10g}")) / 2 + 6
        if x(kept[0]) - x(at) >= room:
            kept.insert(0, at)
    return x, kept


def _upwards(marks: Sequence[Mark], centred: bool, floor: float) -> tuple[Scale, list[float]]:
    """A y scale for marks and intervals; a logarithmic one may cut intervals, but no marks."""
    high = max(mark.high for mark in marks)
    if centred:
        return _around(min(mark.low for mark in marks), high, floor, TOP)
    lowest, highest = min(mark.y for mark in marks), max(mark.y for mark in marks)
    if lowest > 0 and highest / lowest >= _LOGARITHMIC:
        ticks = decades(lowest, high)
        return Scale(min(lowest, ticks[0]), max(high, ticks[-1]), floor, TOP, "log"), ticks
    ticks = nice(0.0, high, 5)
    return Scale(0.0, ticks[-1], floor, TOP), ticks


def _around(low: float, high: float, start: float, end: float) -> tuple[Scale, list[float]]:
    """A scale over differences; large ones are compressed, so that small ones are visible."""
    low, high = min(low, 0.0), max(high, 0.0)
    bent = high - low > _BENT
    ticks = bent_ticks(low, high) if bent else nice(low, high, 4)
    return Scale(ticks[0], ticks[-1], start, end, "bent" if bent else "linear"), ticks


def _curve(series: Series, places: Sequence[tuple[float, float]], y: Scale) -> str:
    drawn = [polyline(places, series.look.dash)]
    for (x, height), mark in zip(places, series.marks, strict=True):
        inside = [told(f"{series.label}: {mark.told}")]
        inside.append(line("interval", x, y(max(mark.low, y.low)), x, y(mark.high)))
        inside.append(marker(series.look.marker, x, height, hollow=mark.hollow))
        drawn.append(f"<g>{''.join(inside)}</g>")
    return colored(series.look, drawn)


def _names(
    series: Sequence[Series], ends: Sequence[tuple[float, float]], right: float
) -> Iterator[str]:
    """Marker and name of each line next to its end, moved apart where they would overlap."""
    heights = apart([height for _, height in ends], TOP - 8, HEIGHT - 8)
    for one, (x, y), height in zip(series, ends, heights, strict=True):
        yield line("leader", x + 6, y, right + 9, height)
        yield colored(one.look, [marker(one.look.marker, right + 15, height)])
        yield text(one.label, right + 23, height + 4)


def _sides(rows: Sequence[Row]) -> tuple[float, float]:
    """The x range for the data of rows, between their names and their texts."""
    left = MARGIN + 30 + max(wide(row.label) for row in rows)
    return left, WIDTH - 14 - max(wide(row.text) for row in rows)


def _row(row: Row, middle: float, drawn: str) -> str:
    key = marker(row.look.marker, MARGIN + 6, middle, hollow=row.hollow)
    inside = [told(f"{row.label}: {row.text}"), key, drawn]
    name = text(row.label, MARGIN + 16, middle + 4)
    return name + colored(row.look, inside) + text(row.text, WIDTH - 2, middle + 4, "soft", "end")


def _rulers(ticks: Sequence[float], x: Scale, bottom: float, tick: Tick) -> Iterator[str]:
    """Vertical lines at the ticks, and labels that do not overlap one nearer to 0."""
    taken: list[tuple[float, float]] = []
    for at in sorted(ticks, key=abs):
        yield line("grid", x(at), TOP - 4, x(at), bottom)
        half = wide(tick(at)) / 2 + 2
        if all(x(at) + half <= left or x(at) - half >= right for left, right in taken):
            taken.append((x(at) - half, x(at) + half))
            yield text(tick(at), x(at), bottom + 16, "soft", "middle")
