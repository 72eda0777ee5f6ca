"""An audit as a picture: positions across, steps down, one panel for each encoding.

One HTML file with inline SVG that loads nothing else. A script shows the numbers of the cell under
the pointer; without it the picture is complete.
"""

import html
import json
from collections.abc import Iterator
from itertools import groupby

from ropewalk.model.inspect.audit import Audit, AuditStep, entries
from ropewalk.model.inspect.audit_report import COLUMNS, HEADLINE, Report, as_json, cells, summary

WIDTH = 600.0  # of a panel's cells, in SVG units, like all sizes below
HEIGHT = 300.0
LOW, HIGH = 7.0, 20.0  # limits of a row's height
LEFT, TOP, BOTTOM = 34.0, 4.0, 16.0  # for the labels
# Marks of a cell: class, name, meaning. Several of them share the cell, in this order.
MARKS = (
    ("w", "written", "stored for the first time"),
    ("c", "rewritten", "an earlier key or value whose bytes this step changed"),
    ("x", "corrupted", "changed although it was right, which must never happen"),
    ("s", "stale", "should have changed at this length, and is still wrong"),
    ("t", "positional term", "computed in this step for this position"),
)

SHARES = {"c": 3, "x": 3}  # parts of a cell's height, 1 for others: rewrites must stand out

STYLE = """\
:root { color-scheme: light dark; --page: #fff; --ink: #1b1d21; --soft: #626a75; --line: #d5d9df;
        --kept: #eceef2; --w: #2268c9; --c: #b5179e; --x: #e00000; --s: #f08c00; --t: #37b48f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --ink: #e6e8ec; --soft: #9aa3af; --line: #363b44; --kept: #262a31;
          --w: #5b9dff; --c: #e352cd; --x: #ff5252; --s: #ffab3d; --t: #37a383; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 100rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0; }
p, ul { max-width: 60rem; } .headline { font-size: 1.1rem; } .soft { color: var(--soft); }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.6rem; }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .45rem;
            vertical-align: -.1rem; border-radius: 2px; }
.arms { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 29rem), 1fr));
        gap: 1.8rem 2.2rem; margin: 1.6rem 0 2rem; }
figure { margin: 0; } figcaption { margin-bottom: .3rem; min-height: 4.9rem; }
figcaption p { margin: 0; font-size: .9rem; line-height: 1.35; color: var(--soft); }
.badge { font-size: .78rem; font-weight: 600; padding: .05rem .5rem; border-radius: 1rem;
         margin-left: .5rem; vertical-align: .1rem; border: 1.5px solid; }
svg { width: 100%; height: auto; display: block; } svg:focus { outline: 1px dotted var(--soft); }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.cells rect { shape-rendering: crispEdges; }
.kept { fill: var(--kept); } .w { fill: var(--w); } .c { fill: var(--c); } .x { fill: var(--x); }
.s { fill: var(--s); } .t { fill: var(--t); }
.badge.w { color: var(--t); } .badge.c { color: var(--c); } .badge.s { color: var(--s); }
.badge.x { color: var(--x); }
.trained { stroke: var(--ink); stroke-dasharray: 4 3; } svg text.mark { fill: var(--ink); }
.at { fill: none; stroke: var(--ink); stroke-width: 1.5; visibility: hidden; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
td, th { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; } th { font-weight: 600; }
#told { position: fixed; display: none; pointer-events: none; max-width: 20rem; z-index: 1;
        background: var(--page); border: 1px solid var(--soft); border-radius: 4px;
        padding: .4rem .6rem; font-size: .86rem; line-height: 1.4; white-space: pre-line; }
"""

# `panel` sets these attributes for the script: data-arm, -width, -height, -left, -top.
SCRIPT = """\
const audit = JSON.parse(document.getElementById("audit").textContent);
const told = document.getElementById("told");
const counted = (list, position) => {
  const found = list.find(one => one[0] === position);
  const parts = found ? [[found[1], "key"], [found[2], "value"]] : [];
  return parts.filter(([n]) => n).map(([n, what]) => `${n} ${what}${n === 1 ? "" : "s"}`)
    .join(" and ");
};
const words = (arm, row, position) => {
  const step = arm.steps[row];
  const lines = [["written", step.written], ["rewritten", step.changed],
    ["should have changed", step.should_change], ["and still wrong", step.stale]]
    .map(([what, list]) => [what, counted(list, position)])
    .filter(([, count]) => count).map(([what, count]) => `${what}: ${count}`);
  if (position >= step.first_term) lines.push("positional term computed");
  if (!lines.length) lines.push("stored, untouched");
  const what = row ? `step ${row}` : "prompt";
  return `position ${position}, ${what}, length ${step.length}\\n` + lines.join("\\n");
};
for (const svg of document.querySelectorAll("svg[data-arm]")) {
  const { arm, width, height, left, top } = svg.dataset;
  const of = audit.arms[+arm], at = svg.querySelector(".at");
  let position = 0, row = 0;
  const show = () => {
    if (position < 0 || row < 0 || row >= of.steps.length || position >= of.steps[row].length)
      return hide();
    at.setAttribute("x", +left + position * width);
    at.setAttribute("y", +top + row * height);
    at.style.visibility = "visible";
    told.textContent = words(of, row, position);
    told.style.display = "block";
    const cell = at.getBoundingClientRect(), box = told.getBoundingClientRect();
    const x = Math.min(cell.right + 10, innerWidth - box.width - 8);
    const below = cell.bottom + 10 + box.height < innerHeight;
    told.style.left = `${Math.max(8, x)}px`;
    told.style.top = `${below ? cell.bottom + 10 : cell.top - box.height - 10}px`;
  };
  const hide = () => { told.style.display = "none"; at.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    position = Math.floor(((event.clientX - box.left) * scale - left) / width);
    row = Math.floor(((event.clientY - box.top) * scale - top) / height);
    show();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in move)) return;
    event.preventDefault();
    row = Math.max(0, Math.min(of.steps.length - 1, row + move[event.key][1]));
    position = Math.max(0, Math.min(of.steps[row].length - 1, position + move[event.key][0]));
    show();
  });
}
"""


def to_html(report: Report) -> str:
    """A whole page."""
    data = json.dumps(as_json(report), separators=(",", ":")).replace("<", "\\u003c")
    legend = "\n".join(
        f'<li title="{meaning}"><i class="{mark}" style="background: var(--{mark})"></i>'
        f"<b>{name}</b> {meaning}</li>"
        for mark, name, meaning in MARKS
        if mark != "x" or report.unexpected
    )
    panels = "\n".join(panel(index, one) for index, one in enumerate(report.audits))
    title = f"What each step changes in the cache: {html.escape(report.model)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="headline">{html.escape(HEADLINE)}</p>
<p>Across: positions. Down: steps, the prompt first, then one token each, labelled with the length
that they reach. Every step's cache is
compared byte by byte with the one before, and with keys and values computed from scratch at the
new length. Point at a cell for its numbers.</p>
<ul class="legend">
{legend}
<li><i style="background: var(--kept)"></i><b>stored</b> and untouched</li>
</ul>
<div class="arms">
{panels}
</div>
<div class="wide">
{_table(report)}
</div>
<p class="soft">“Changed”, “should change” and “stale” count an entry again in every step.
{html.escape(report.note)}</p>
<div id="told" role="status"></div>
<script type="application/json" id="audit">{data}</script>
<script>
{SCRIPT}</script>
</body>
</html>
"""


def panel(index: int, audit: Audit) -> str:
    """One encoding's <figure>."""
    rows, positions = len(audit.steps), audit.steps[-1].length
    width = round(WIDTH / positions, 3)
    height = round(min(max(HEIGHT / rows, LOW), HIGH), 3)
    across, down = width * positions, height * rows
    cells = "".join(
        rectangle
        for row, step in enumerate(audit.steps)
        for rectangle in _row(step, LEFT, TOP + row * height, width, height)
    )
    name = html.escape(audit.name)
    badge, verdict = told(audit)
    classes, word = badge
    note = f" {html.escape(audit.note[0].upper() + audit.note[1:])}." if audit.note else ""
    return f"""<figure>
<figcaption><h2>{name}<span class="badge {classes}">{word}</span></h2>
<p>{html.escape(verdict)}{note}</p></figcaption>
<svg viewBox="0 0 {LEFT + across + 2:g} {TOP + down + BOTTOM:g}" role="img" tabindex="0"
 aria-label="{name}: {html.escape(verdict, quote=True)}" data-arm="{index}"
 data-width="{width}" data-height="{height}" data-left="{LEFT:g}" data-top="{TOP:g}">
<g class="cells">{cells}</g>
{"".join(_labels(audit, across, down, height))}
<rect class="at" width="{width}" height="{height}"/>
</svg>
</figure>"""


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
        badge = ("w", "0 changed")
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


def _row(step: AuditStep, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Rectangles of one step; runs of equal cells are merged."""
    yield _rectangle("kept", x, y, step.length * width, height)
    marks = _marks(step)
    for kinds, run in groupby(range(step.length), lambda position: marks[position]):
        of = list(run)
        unit = height / sum(SHARES.get(kind, 1) for kind in kinds) if kinds else 0.0
        top = y
        for kind in kinds:
            share = SHARES.get(kind, 1) * unit
            yield _rectangle(kind, x + of[0] * width, top, len(of) * width, share)
            top += share


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


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>'
    )


def _labels(audit: Audit, across: float, down: float, height: float) -> Iterator[str]:
    """Lengths at the left, positions below, and the length where frequencies begin to change."""
    first, last = audit.steps[0].length, audit.steps[-1].length
    beside, below = LEFT - 5, TOP + down + 12
    yield f'<text x="{beside}" y="{TOP + 9}" text-anchor="end">{first}</text>'
    yield f'<text x="{beside}" y="{TOP + down - 1}" text-anchor="end">{last}</text>'
    ends = ((LEFT, "start", "position 0"), (LEFT + across, "end", f"position {last - 1}"))
    for x, anchor, text in ends:
        yield f'<text x="{x:.1f}" y="{below}" text-anchor="{anchor}">{text}</text>'
    if audit.trained_length is not None and first <= audit.trained_length < last:
        y = TOP + (audit.trained_length - first + 1) * height
        yield f'<line class="trained" x1="{LEFT}" x2="{LEFT + across}" y1="{y}" y2="{y}"/>'
        yield f'<text class="mark" x="{beside}" y="{y + 4}" text-anchor="end">'
        yield f"{audit.trained_length}</text>"


def _table(report: Report) -> str:
    rows = [_cells("th", COLUMNS), *(_cells("td", cells(one)) for one in report.audits)]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _cells(tag: str, texts: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"
