"""Plots of goodput: what share of the requests met the objectives of `--slo`."""

from collections.abc import Iterator, Mapping, Sequence

from load_tests.cells import Cell, Spread, spread
from load_tests.charts import Mark, Row, Series, dots, lines
from load_tests.latency_plots import LOADS, Along, by_context, by_load
from load_tests.plot import Plot, Subject, Table, plain_tick
from load_tests.statistics import Goodput, goodput, parse_slo
from load_tests.words import digits, listed

_ACROSS = {"context": "tokens of context", **LOADS}
_HEAD = "requests that met the objectives, %"


def goodput_plots(subject: Subject) -> Iterator[Plot]:
    """For each workload, where objectives were given."""
    text = subject.result.arguments.get("slo")
    if not isinstance(text, str):
        return
    objectives = parse_slo(text)
    for name, by, along in _along(subject):
        found = [(x, cell, _shares(subject, cell, objectives)) for x, cell in along]
        if not any(shares for _, _, shares in found):
            continue
        yield Plot(
            key=f"{name}-{by}-goodput",
            title=f"Goodput by {by}: {name}",
            findings=tuple(_said(cell, shares) for _, cell, shares in reversed(found) if shares),
            charts=(_chart(subject, _ACROSS[by], found),),
            table=_table(subject, [cell for _, cell in along], objectives),
            note=(
                f"Objectives: {text}. A request is good when it was served and each of its own "
                "latencies is within its objective; shares are of those that began in the steady "
                "window and did not leave as planned."
            ),
        )


def _along(subject: Subject) -> Iterator[tuple[str, str, Along]]:
    for name, along in by_context(subject).items():
        yield name, "context", along
    for (name, kind), along in by_load(subject).items():
        yield name, kind, along


def _of(cell: Cell, arm: str, objectives: Mapping[str, float]) -> list[Goodput]:
    found = [goodput(run, objectives) for run in cell.runs.get(arm, ())]
    return [one for one in found if one is not None]


def _shares(subject: Subject, cell: Cell, objectives: Mapping[str, float]) -> dict[str, Spread]:
    """Each arm's percentage of good requests."""
    found = {
        arm: spread([one.share * 100 for one in _of(cell, arm, objectives)]) for arm in subject.arms
    }
    return {arm: one for arm, one in found.items() if one is not None}


def _chart(
    subject: Subject, across: str, found: Sequence[tuple[float, Cell, Mapping[str, Spread]]]
) -> str:
    if len(found) == 1:
        _, cell, shares = found[0]
        rows = [
            Row(arm, subject.looks[arm], one.median, one.low, one.high, digits(one.median))
            for arm, one in shares.items()
        ]
        return dots(_HEAD, {"": rows}, cell.label, plain_tick)
    series = []
    for arm in subject.arms:
        marks = [
            Mark(x, one.median, one.low, one.high, f"{cell.label}: {digits(one.median)} %")
            for x, cell, shares in found
            if (one := shares.get(arm)) is not None
        ]
        if marks:
            series.append(Series(arm, subject.looks[arm], tuple(marks)))
    return lines(_HEAD, series, across, plain_tick)


def _said(cell: Cell, shares: Mapping[str, Spread]) -> str:
    """Who meets the objectives most and least often."""
    best, worst = max(one.median for one in shares.values()), min(s.median for s in shares.values())
    if best == worst:
        return f"{cell.where}, every arm met the objectives in {digits(best)} % of the requests."
    ends = {
        value: [arm for arm, one in shares.items() if one.median == value]
        for value in (best, worst)
    }
    return (
        f"{cell.where}, {listed(ends[best])} met the objectives in {digits(best)} % of the "
        f"requests, {listed(ends[worst])} in {digits(worst)} %."
    )


def _table(subject: Subject, cells: Sequence[Cell], objectives: Mapping[str, float]) -> Table:
    table: list[tuple[str, ...]] = [
        ("at", "arm", "good, %", "good requests/s", "their output tokens/s")
    ]
    for cell in cells:
        for arm in subject.arms:
            found = _of(cell, arm, objectives)
            columns = (
                [one.share * 100 for one in found],
                [one.requests_per_s for one in found],
                [one.tokens_per_s for one in found],
            )
            table.append((cell.label, arm, *map(_shown, columns)))
    return table


def _shown(values: Sequence[float]) -> str:
    found = spread(values)
    if found is None:
        return "–"
    return f"{digits(found.median)} ({digits(found.low)}–{digits(found.high)})"
