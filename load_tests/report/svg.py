"""Building blocks of charts: colours, markers, scales, ticks and SVG elements.

Every arm has a colour and a marker of its own (`looks`). Text has the page's text colour. Colours
are CSS classes, so that the page defines them.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH = 440.0  # of a chart; all lengths here are in SVG units
LETTER = 6.7  # width of a letter in text of 12 units
LINE = 15.0  # between two labels
MARGIN = 4.0

# Okabe and Ito's colours, darkened or lightened to a contrast of 3:1 on white or black; the first
# is that of text.
LIGHT = ("#30343b", "#0b6bab", "#c8500a", "#00845f", "#a8458a", "#9a7200", "#3d9ad1", "#7b7f87")
DARK = ("#e6e8ec", "#5aaef0", "#ff8b4d", "#35c296", "#e68cc4", "#e0b020", "#a5d8fa", "#9aa0aa")
PATHS = {
    "square": "M-3.6-3.6H3.6V3.6H-3.6Z",
    "triangle": "M0-4.8L4.6 3.4H-4.6Z",
    "diamond": "M0-5.2L4.4 0 0 5.2-4.4 0Z",
    "hourglass": "M-4-4.5H4L-4 4.5H4Z",
    "drop": "M0 4.8L4.6-3.4H-4.6Z",
    "bow": "M-4.6-4V4L4.6-4V4Z",
    "bar": "M-2-5H2V5H-2Z",
}
MARKERS = ("circle", *PATHS)
DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4")
CHART_STYLE = """\
svg text { font: 12px system-ui, sans-serif; fill: var(--ink);
           paint-order: stroke; stroke: var(--page); stroke-width: 3px; stroke-linejoin: round; }
svg text.head { font-weight: 600; font-size: 13px; } svg text.soft { fill: var(--soft); }
svg text.group { font-weight: 600; } svg .grid { stroke: var(--line); }
svg .level { stroke: var(--soft); stroke-dasharray: 5 4; } svg .leader { stroke: var(--soft); }
svg polyline { fill: none; stroke: currentColor; stroke-width: 1.7; }
svg .interval { stroke: currentColor; stroke-width: 1.5; } svg rect { fill: currentColor; }
svg .full { fill: currentColor; stroke: currentColor; stroke-width: 1.6; }
svg .open { fill: var(--page); stroke: currentColor; stroke-width: 1.6; }
"""


@dataclass(frozen=True, slots=True)
class Look:
    """How an arm is drawn everywhere on a page."""

    color: int  # index into LIGHT and DARK
    marker: str
    dash: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data to units: linear, logarithmic, or `bent`: linear near 0, logarithmic beyond 1."""

    low: float
    high: float
    start: float
    end: float
    kind: Literal["linear", "log", "bent"] = "linear"

    def __call__(self, value: float) -> float:
        low, high = self._even(self.low), self._even(self.high)
        return self.start + (self._even(value) - low) / (high - low) * (self.end - self.start)

    def _even(self, value: float) -> float:
        if self.kind == "log":
            return math.log(value)
        return math.asinh(value) if self.kind == "bent" else value


def looks(labels: Sequence[str], zero: str | None) -> Mapping[str, Look]:
    """Colour, marker and dash of each arm; the zero has the colour of text."""
    others = [label for label in labels if label != zero]
    found = {
        label: Look(1 + i % (len(LIGHT) - 1), MARKERS[(1 + i) % 8], DASHES[i % len(DASHES)])
        for i, label in enumerate(others)
    }
    if zero is not None:
        found[zero] = Look(0, MARKERS[0], "")
    return {label: found[label] for label in labels}


def colors(values: Sequence[str]) -> str:
    """CSS declarations of the arms' colours."""
    return " ".join(f"--a{i}: {value};" for i, value in enumerate(values))


def color_rules() -> str:
    return "".join(f".a{i} {{ color: var(--a{i}); }} " for i in range(len(LIGHT)))


def nice(low: float, high: float, about: int) -> list[float]:
    """Round numbers, by 1, 2 or 5 times a power of ten, from below `low` to above `high`."""
    wide = (high - low) or abs(high) or 1.0
    rough = wide / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around positive numbers, also times 2 and 5 if there are few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    units = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [unit * 10.0**power for power in range(first, last + 1) for unit in units]
    below = max(tick for tick in ticks if tick <= low * 1.000001)
    above = next((tick for tick in ticks if tick >= high * 0.999999), ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def bent_ticks(low: float, high: float) -> list[float]:
    """0 and 1, 3, 10, 30 ... both ways, from below `low` to above `high`."""
    most = max(abs(low), abs(high), 1.0)
    steps = [unit * 10.0**power for power in range(9) for unit in (1, 3)]
    sizes = [size for size in steps if size < most * 3.4]
    ticks = [-size for size in reversed(sizes)] + [0.0] + sizes
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def apart(heights: Sequence[float], low: float, high: float) -> list[float]:
    """Heights for labels in their order, at least LINE apart, as near as possible to `heights`.

    Labels that would overlap become a block around the mean of their heights, within [low, high].
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[list[int]] = []

    def top(block: list[int]) -> float:
        middle = sum(heights[i] for i in block) / len(block)
        tall = (len(block) - 1) * LINE
        return max(low, min(middle - tall / 2, high - tall))

    for i in order:
        blocks.append([i])
        while len(blocks) > 1 and top(blocks[-1]) < top(blocks[-2]) + len(blocks[-2]) * LINE:
            last = blocks.pop()
            blocks[-1] += last
    found = dict.fromkeys(order, 0.0)
    for block in blocks:
        found.update((i, top(block) + place * LINE) for place, i in enumerate(block))
    return [found[i] for i in range(len(heights))]


def wide(words: str) -> float:
    """The approximate width of a text."""
    return LETTER * len(words)


def text(words: str, x: float, y: float, kind: str = "", anchor: str = "start") -> str:
    classes = f' class="{kind}"' if kind else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{classes}{side}>{html.escape(words)}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rectangle(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def polyline(points: Iterable[tuple[float, float]], dash: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}"{dashed}/>'


def told(words: str) -> str:
    """The tooltip of the elements next to it."""
    return f"<title>{html.escape(words)}</title>"


def colored(look: Look, parts: Iterable[str]) -> str:
    return f'<g class="a{look.color}">{"".join(parts)}</g>'


def marker(name: str, x: float, y: float, *, hollow: bool = False) -> str:
    kind = "open" if hollow else "full"
    if name == "circle":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<path class="{kind}" transform="translate({x:.1f} {y:.1f})" d="{PATHS[name]}"/>'


def svg(title: str, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="{html.escape(title, quote=True)}">\n'
        f"{text(title, MARGIN, 16, 'head')}\n" + "\n".join(parts) + "\n</svg>"
    )
