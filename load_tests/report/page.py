"""A result as one HTML page: findings, plots and their numbers.

It needs no script: tooltips show the numbers of marks, and every plot has a table of them.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ropewalk.load_tests.common.types import Result
from ropewalk.load_tests.report.charts import side_by_side
from ropewalk.load_tests.report.plots import plots
from ropewalk.load_tests.report.result import BadResult, read
from ropewalk.load_tests.report.table import all_warnings
from ropewalk.report.page import Page, to_html
from ropewalk.report.svg import svg


def page(result: Result) -> str:
    sections = plots(result)
    workloads = list(dict.fromkeys(run.point.workload for run in result.runs))
    names = list(dict.fromkeys(name for facts in result.variants.values() for name in facts))
    variants = [
        ("variant", *names),
        *(
            (variant, *(_value(own.get(name, "")) for name in names))
            for variant, own in result.variants.items()
        ),
    ]
    return to_html(
        Page(
            title=f"Load test: {', '.join(workloads) or 'nothing was measured'}",
            facts=_facts(result),
            details={"The variants": variants},
            reassurance="No warnings. Client and servers agree where both count.",
            warnings=list(all_warnings(result)),
            findings=[(each, each.findings[0]) for each in sections if each.findings],
            sections=sections,
        )
    )


def _facts(result: Result) -> dict[str, str]:
    """What was measured, where and how, and the command that repeats it."""
    known = {name: _value(value) for name, value in result.environment.items() if value is not None}
    rounds = len({run.round for run in result.runs})
    variants = [
        f"{variant} (the baseline)" if variant == result.baseline else variant
        for variant in result.variants
    ]
    return {
        "command": result.command,
        **known,
        "runs": f"{len(result.runs):,}, in {rounds} round{'' if rounds == 1 else 's'}",
        "variants": ", ".join(variants),
    }


def _value(value: object) -> str:
    """{"model": "m", "block": 16} → model m, block 16."""
    if isinstance(value, Mapping):
        return ", ".join(_words(value))
    return str(value)


def _words(facts: Mapping[str, object]) -> Iterator[str]:
    for name, value in facts.items():
        if value not in (None, "", {}):
            yield f"{name} {_value(value)}"


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
    text = svg(side_by_side(found[chosen.plot].pictures), "a")
    chosen.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
