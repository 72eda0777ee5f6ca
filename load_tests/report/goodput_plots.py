"""Plots of goodput: what share of the requests met the objectives of `--slo`."""

from collections.abc import Iterator, Mapping, Sequence

from ropewalk.load_tests.common.statistics import Goodput, goodput, parse_slo
from ropewalk.load_tests.report.cells import Cell
from ropewalk.load_tests.report.charts import Mark
from ropewalk.load_tests.report.formatting import digits
from ropewalk.load_tests.report.plot import (
    Subject,
    chart,
    context_axes,
    load_axes,
)
from ropewalk.report.page import Section, Table
from ropewalk.report.statistics import Estimate, spread

_HEAD = "requests that met the objectives, %"


def goodput_plots(subject: Subject) -> Iterator[Section]:
    """A plot for each workload, if objectives were given."""
    text = subject.result.arguments.get("slo")
    if not isinstance(text, str):
        return
    objectives = parse_slo(text)
    for axis in (*context_axes(subject), *load_axes(subject)):
        found = [(cell, _shares(subject, cell, objectives)) for cell in axis.cells]
        if not any(shares for _, shares in found):
            continue
        marks: dict[str, list[Mark]] = {}
        for cell, shares in found:
            for variant, one in shares.items():
                share = digits(one.value)
                mark = Mark(one, f"{cell.label}: {share} %", share, axis.x(cell))
                marks.setdefault(variant, []).append(mark)
        yield Section(
            key=f"{axis.name}-{axis.by}-goodput",
            title=f"Goodput by {axis.by}: {axis.name}",
            findings=tuple(_said(cell, shares) for cell, shares in reversed(found) if shares),
            pictures=(chart(_HEAD, subject.series(marks), axis),),
            table=_table(subject, axis.cells, objectives),
            note=(
                f"Objectives: {text}. A request is good if it was served and each of its latencies "
                "met its objective; shares are of the requests that began in the steady window, "
                "without those whose client left as planned. A share is the median of the runs, "
                "with their range where they differ; ranges that overlap order nothing."
            ),
        )


def _of(cell: Cell, variant: str, objectives: Mapping[str, float]) -> list[Goodput]:
    found = [goodput(run, objectives) for run in cell.runs.get(variant, ())]
    return [one for one in found if one is not None]


def _shares(subject: Subject, cell: Cell, objectives: Mapping[str, float]) -> dict[str, Estimate]:
    """Each variant's percentage of good requests."""
    found = {
        variant: spread([one.share * 100 for one in _of(cell, variant, objectives)])
        for variant in subject.variants
    }
    return {variant: one for variant, one in found.items() if one is not None}


def _said(cell: Cell, shares: Mapping[str, Estimate]) -> str:
    """How often each variant met the objectives; medians alone would name winners by chance."""
    if len(same := set(shares.values())) == 1 and (one := same.pop()).low == one.high:
        return f"{cell.where}, every variant met the objectives in {_share(one)} of the requests."
    (first, share), *others = ((variant, _share(one)) for variant, one in shares.items())
    rest = "".join(f", {variant} in {share}" for variant, share in others)
    return f"{cell.where}, {first} met the objectives in {share} of the requests{rest}."


def _share(one: Estimate) -> str:
    """100 %, or 92 % (84–96), where the runs differ."""
    runs = "" if one.low == one.high else f" ({digits(one.low)}–{digits(one.high)})"
    return f"{digits(one.value)} %{runs}"


def _table(subject: Subject, cells: Sequence[Cell], objectives: Mapping[str, float]) -> Table:
    table: list[tuple[str, ...]] = [
        ("at", "variant", "good, %", "good requests/s", "good output tokens/s")
    ]
    for cell in cells:
        for variant in subject.variants:
            found = _of(cell, variant, objectives)
            columns = (
                [one.share * 100 for one in found],
                [one.requests_per_s for one in found],
                [one.tokens_per_s for one in found],
            )
            table.append((cell.label, variant, *map(_shown, columns)))
    return table


def _shown(values: Sequence[float]) -> str:
    found = spread(values)
    if found is None:
        return "–"
    return f"{digits(found.value)} ({digits(found.low)}–{digits(found.high)})"
