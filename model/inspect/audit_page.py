"""An audit as a picture: positions across, steps down, one panel for each encoding.

A script shows the numbers of the cell under the pointer; without it the picture is complete.
"""

from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from ropewalk.model.inspect.audit import Audit, AuditStep, entries
from ropewalk.model.inspect.audit_report import COLUMNS, HEADLINE, Report, as_json, cells, summary
from ropewalk.report import page
from ropewalk.report.figure import INK, SMALL, SOFT, Picture
from ropewalk.report.page import Page, Section

WIDTH = 430.0  # of a panel's cells, in points, like all sizes below
HEIGHT = 215.0
LOW, HIGH = 5.0, 14.0  # limits of a row's height
LEFT, TOP, BOTTOM = 28.0, 3.0, 14.0  # for the labels
COLORS = {  # beside the page's own
    "kept": ("#eceef2", "#262a31"),
    "w": ("#2268c9", "#5b9dff"),
    "c": ("#b5179e", "#e352cd"),
    "x": ("#e00000", "#ff5252"),
    "s": ("#f08c00", "#ffab3d"),
    "t": ("#37b48f", "#37a383"),
}
# Marks of a cell: colour, name, meaning. Several of them share the cell, in this order.
MARKS = (
    ("w", "written", "stored for the first time"),
    ("c", "rewritten", "an earlier key or value whose bytes this step changed"),
    ("x", "corrupted", "changed although it was right, which must never happen"),
    ("s", "stale", "should have changed at this length, and is still wrong"),
    ("t", "positional term", "computed in this step for this position"),
)
SHARES = {"c": 3, "x": 3}  # parts of a cell's height, 1 for others: rewrites must stand out

LEAD = (
    HEADLINE,
    "Across: positions. Down: steps, the prompt first, then one token each, labelled with the "
    "length that they reach. Every step's cache is compared byte by byte with the one before, "
    "and with keys and values computed from scratch at the new length. Point at a cell for its "
    "numbers.",
)


def to_html(report: Report) -> str:
    legend = [mark for mark in MARKS if mark[0] != "x" or report.unexpected]
    return page.to_html(
        Page(
            title=f"What each step changes in the cache: {report.model}",
            lead=LEAD,
            legend=[*legend, ("kept", "stored", "and untouched")],
            sections=[panel(index, one) for index, one in enumerate(report.audits)],
            beside=True,
            table=[COLUMNS, *map(cells, report.audits)],
            note="“Changed”, “should change” and “stale” count an entry again in every step. "
            + report.note,
            colors=COLORS,
            data=as_json(report),
            script=files(__package__).joinpath("audit_page.js").read_text("utf-8"),
        )
    )


def panel(index: int, audit: Audit) -> Section:
    """One encoding's section."""
    rows, positions = len(audit.steps), audit.steps[-1].length
    width, height = WIDTH / positions, min(max(HEIGHT / rows, LOW), HIGH)
    badge, verdict = told(audit)
    picture = Picture(
        "panel",
        f"{audit.name}: {verdict}",
        "",
        lambda figure: _draw(figure, audit, height),
        (TOP + rows * height + BOTTOM) / 72,
        (LEFT + WIDTH + 2) / 72,
        {"arm": index, "width": width, "height": height, "left": LEFT, "top": TOP},
        placed=True,
    )
    return Section(
        audit.name,
        [picture],
        [f"{verdict} {audit.note[:1].upper()}{audit.note[1:]}{'.' if audit.note else ''}".strip()],
        badge=badge,
        wide=True,
    )


def told(audit: Audit) -> tuple[tuple[str, str], str]:
    """A badge, as class and word, and what the last step did, in one sentence."""
    found, last = summary(audit), audit.steps[-1]
    if found.unexpected:
        badge = ("x", "corrupted")
    elif found.changed:
        badge = ("c", "keys rewritten")
    elif found.stale:
        badge = ("s", "goes stale")
    else:
        badge = ("t", "0 changed")
    verdict = (
        f"Last token: {entries(last.changed):,} earlier entries changed, "
        f"{entries(last.should_change):,} should have changed; {_terms(last)}."
    )
    return badge, verdict


def _terms(step: AuditStep) -> str:
    count = step.length - step.first_term
    if count == 0:
        return "no positional term"
    if count == step.length:
        return f"positional terms for all {count:,} positions"
    return f"positional terms for the newest {f'{count:,} positions' if count > 1 else 'position'}"


def rectangles(step: AuditStep) -> Iterator[tuple[str, int, int, float, float]]:
    """Colour, first position and number of positions, and top and bottom within the row.

    Equal cells side by side are one rectangle.
    """
    yield "kept", 0, step.length, 0.0, 1.0
    marks = _marks(step)
    for kinds, run in groupby(range(step.length), lambda position: marks[position]):
        of, top = list(run), 0.0
        for kind in kinds:
            bottom = top + SHARES.get(kind, 1) / sum(SHARES.get(one, 1) for one in kinds)
            yield kind, of[0], len(of), top, bottom
            top = bottom


def _marks(step: AuditStep) -> list[tuple[str, ...]]:
    """The marks of each position, in the order of MARKS."""
    said: list[set[str]] = [set() for _ in range(step.length)]
    lists = (("w", step.written), ("c", step.changed), ("s", step.stale), ("x", step.unexpected))
    for mark, places in lists:
        for place in places:
            if place.position < step.length:  # a stray write past the end has no cell
                said[place.position].add(mark)
    for position in range(step.first_term, step.length):
        said[position].add("t")
    return [tuple(mark for mark, *_ in MARKS if mark in one) for one in said]


def _draw(figure: Figure | SubFigure, audit: Audit, height: float) -> None:
    """A path for each colour; lengths at the left, positions below, the trained length.

    height: of a row.
    """
    first, last, rows = audit.steps[0].length, audit.steps[-1].length, len(audit.steps)
    across, down = LEFT + WIDTH + 2, TOP + rows * height + BOTTOM
    at = (LEFT / across, BOTTOM / down, WIDTH / across, 1 - (TOP + BOTTOM) / down)
    axes = figure.add_axes(at, xlim=(0, last), ylim=(rows, 0))
    axes.axis("off")
    found: dict[str, list[Path]] = {}
    for row, step in enumerate(audit.steps):
        for kind, start, count, top, bottom in rectangles(step):
            x, y = (start, start + count), (row + top, row + bottom)
            corners = [(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1]), (x[0], y[0])]
            found.setdefault(kind, []).append(Path(corners, closed=True))
    for kind, paths in found.items():
        whole = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(whole, facecolor=COLORS[kind][0], linewidth=0, clip_on=False))
    beside: Any = {"color": SOFT, "fontsize": SMALL, "ha": "right", "va": "center"}
    axes.text(-0.008 * last, 0.5, f"{first}", **beside)
    axes.text(-0.008 * last, rows - 0.5, f"{last}", **beside)
    below: Any = {"color": SOFT, "fontsize": SMALL, "va": "top"}
    axes.text(0, 1.012 * rows, "position 0", **below)
    axes.text(last, 1.012 * rows, f"position {last - 1}", ha="right", **below)
    if audit.trained_length is not None and first <= audit.trained_length < last:
        place = audit.trained_length - first + 1
        axes.plot([0, last], [place, place], "--", color=INK, linewidth=1, clip_on=False)
        axes.text(-0.008 * last, place, f"{audit.trained_length}", **beside | {"color": INK})
