"""A result as one self-contained HTML page: findings, plots and their numbers.

It needs no script: tooltips show the numbers of marks, and every plot has a table of them.
"""

import argparse
import html
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ropewalk.load_tests.common.types import Result
from ropewalk.load_tests.report.charts import standalone
from ropewalk.load_tests.report.plot import Plot, Table
from ropewalk.load_tests.report.plots import plots
from ropewalk.load_tests.report.result import BadResult, read
from ropewalk.load_tests.report.svg import CHART_STYLE, DARK, LIGHT, color_rules, colors
from ropewalk.load_tests.report.table import all_warnings

_STYLE = f"""\
:root {{ color-scheme: light dark; --page: #fff; --ink: #1b1d21; --soft: #5d6570; --line: #d5d9df;
        --alarm: #fff4e5; --edge: #c8500a; {colors(LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14161a; --ink: #e6e8ec; --soft: #9aa3af; --line: #363b44;
          --alarm: #2b2118; --edge: #ff8b4d; {colors(DARK)} }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .3rem; }} h2 {{ font-size: 1.2rem; margin: 0 0 .2rem; }}
p, ul {{ max-width: 54rem; }} .soft, .note {{ color: var(--soft); }}
.note {{ font-size: .88rem; line-height: 1.4; margin: .5rem 0 .3rem; }}
section {{ border-top: 1px solid var(--line); margin-top: 1.6rem; padding-top: 1rem; }}
.findings {{ margin-bottom: .8rem; }} .findings p {{ margin: .15rem 0; }}
li {{ margin-bottom: .35rem; }}
.alarm {{ background: var(--alarm); border-left: 4px solid var(--edge); padding: .6rem 1rem;
         margin: 1rem 0; }} .alarm h2 {{ font-size: 1rem; }} .alarm ul {{ margin: 0; }}
.charts {{ display: grid; gap: 1rem 2rem;
          grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }}
svg {{ width: 100%; height: auto; display: block; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .6rem 0; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
code {{ font-size: .88rem; overflow-wrap: anywhere; }}
summary {{ cursor: pointer; color: var(--soft); }} .wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .86rem; margin: .4rem 0; }}
td, th {{ padding: .2rem .9rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line);
         font-variant-numeric: tabular-nums; white-space: nowrap; }}
{CHART_STYLE}{color_rules()}
@media (max-width: 40rem) {{ dl {{ grid-template-columns: 1fr; }} dd {{ margin-bottom: .4rem; }} }}
"""


def page(result: Result) -> str:
    """A whole page."""
    shown = plots(result)
    workloads = list(dict.fromkeys(run.point.workload for run in result.runs))
    title = _escaped(f"Load test: {', '.join(workloads) or 'nothing was measured'}")
    findings = "\n".join(
        f'<li><a href="#{_escaped(plot.key)}">{_escaped(plot.title)}</a>. '
        f"{_escaped(plot.findings[0])}</li>"
        for plot in shown
        if plot.findings
    )
    sections = "\n".join(map(_section, shown))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{_facts(result)}
{_alarms(result)}
<h2>Findings</h2>
<ul>
{findings or "<li>Nothing was measured.</li>"}
</ul>
{sections}
</body>
</html>
"""


def _section(plot: Plot) -> str:
    charts = "\n".join(f"<div>{chart}</div>" for chart in plot.charts)
    findings = "\n".join(f"<p>{_escaped(sentence)}</p>" for sentence in plot.findings)
    return f"""<section id="{_escaped(plot.key)}">
<h2>{_escaped(plot.title)}</h2>
<div class="findings">
{findings}
</div>
<div class="charts">
{charts}
</div>
<p class="note">{_escaped(plot.note)}</p>
{_details("The numbers", plot.table)}
</section>"""


def _facts(result: Result) -> str:
    """What was measured, where and how, and the command that repeats it."""
    pairs = [("command", f"<code>{_escaped(result.command)}</code>")]
    known = {name: value for name, value in result.environment.items() if value is not None}
    pairs += [(name, _escaped(_value(value))) for name, value in known.items()]
    blocks = len({run.block for run in result.runs})
    pairs.append(("runs", f"{len(result.runs):,}, in {blocks} block{'' if blocks == 1 else 's'}"))
    arms = [f"{arm} (the zero)" if arm == result.zero else arm for arm in result.arms]
    pairs.append(("arms", _escaped(", ".join(arms))))
    listed = "\n".join(f"<dt>{_escaped(name)}</dt><dd>{text}</dd>" for name, text in pairs)
    names = list(dict.fromkeys(name for facts in result.arms.values() for name in facts))
    table = [("arm", *names)]
    for arm, facts in result.arms.items():
        table.append((arm, *(_value(facts.get(name, "")) for name in names)))
    return f"<dl>\n{listed}\n</dl>\n{_details('The arms', table)}"


def _alarms(result: Result) -> str:
    said = list(all_warnings(result))
    if not said:
        return '<p class="soft">No warnings. Client and servers agree where both count.</p>'
    items = "\n".join(f"<li>{_escaped(sentence)}</li>" for sentence in said)
    return f'<div class="alarm" role="note">\n<h2>Warnings</h2>\n<ul>\n{items}\n</ul>\n</div>'


def _details(title: str, table: Table) -> str:
    rows = [_cells("th", table[0]), *(_cells("td", row) for row in table[1:])]
    inside = "<table>\n" + "\n".join(rows) + "\n</table>"
    return f'<details><summary>{title}</summary><div class="wide">\n{inside}\n</div></details>'


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_escaped(text)}</{tag}>" for text in texts) + "</tr>"


def _value(value: object) -> str:
    """{"model": "m", "block": 16} → model m, block 16."""
    if isinstance(value, Mapping):
        return ", ".join(_words(value))
    return str(value)


def _words(facts: Mapping[str, object]) -> Iterator[str]:
    for name, value in facts.items():
        if value not in (None, "", {}):
            yield f"{name} {_value(value)}"


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write result.json as report.html, or one plot of it as an SVG file."""
    options = argparse.ArgumentParser(
        prog="python -m ropewalk.load_tests.report.page", description=main.__doc__
    )
    options.add_argument("result", type=Path)
    options.add_argument("output", type=Path)
    options.add_argument("--plot", metavar="KEY", help="only this plot, such as longctx, as SVG")
    chosen = options.parse_args(arguments)
    try:
        result = read(chosen.result)
    except (BadResult, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.plot is None:
        chosen.output.write_text(page(result), encoding="utf-8")
        return 0
    found = {plot.key: plot for plot in plots(result)}
    if chosen.plot not in found:
        known = ", ".join(found) or "none"
        print(f"there is no plot {chosen.plot!r} here; there are: {known}", file=sys.stderr)
        return 2
    chosen.output.write_text(standalone(found[chosen.plot].charts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
