"""Plots of what clients saw: latency by context and by load, bias forms and frames, throughput."""

from collections.abc import Iterator, Mapping, Sequence

from load_tests.cells import Cell
from load_tests.charts import Mark, Series, dots, lines
from load_tests.plot import (
    Plot,
    Subject,
    Table,
    measured,
    percent_tick,
    plain_tick,
    relative,
    relative_rows,
    rows,
    shown,
)
from load_tests.words import column, compared, defined, heading, interval, unit

STEP, FIRST, THROUGHPUT = "itl_p50", "ttft_p50", "output_tokens_per_s"
LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
LOADS = {"rate": "requests per second", "concurrency": "requests in flight"}
_RUNS = "A mark is the median of the runs; its bar reaches from the lowest to the highest."
_INTERVAL = (
    "A bar at a difference is its 95 % interval over the blocks; a hollow mark is no difference, "
    "which allows for the number of arms compared. Beside large differences the axis is compressed."
)

Along = Sequence[tuple[float, Cell]]  # x and what was measured there


def context_plots(subject: Subject) -> Iterator[Plot]:
    """Latency over the length of the context, for each workload that varies it."""
    for name, along in by_context(subject).items():
        yield _over_context(subject, name, f"Step latency by context: {name}", along, STEP)
        key, title = f"{name}-first", f"Time to first token by context: {name}"
        yield _over_context(subject, key, title, along, FIRST)


def setting_plots(subject: Subject) -> Iterator[Plot]:
    """Bias forms and RoPE frames of one encoding, against the zero and against each other."""
    cells = [cell for along in by_context(subject).values() for _, cell in along]
    cells = cells or [cell for cell in subject.cells if not cell.profile.open_loop]
    for encoding, arms in _settings(subject).items():
        base = subject.zero or arms[0]
        charts = []
        for metric in (STEP, FIRST):
            groups = {
                cell.label: relative_rows(subject, cell, base, arms, metric) for cell in cells
            }
            if groups := {label: found for label, found in groups.items() if found}:
                head = f"{encoding}: {heading(metric)}, difference to {base}"
                charts.append(dots(head, groups, "", percent_tick, centred=True))
        if charts:
            said = [_dearest(cells[-1], arms, metric) for metric in (STEP, FIRST)]
            yield Plot(
                key=f"{encoding}-settings",
                title=f"Bias forms and frames: {encoding}",
                findings=tuple(filter(None, said)),
                charts=tuple(charts),
                table=_table(subject, cells, (STEP, FIRST), arms),
                note=f"{_INTERVAL} {defined((STEP, FIRST))}",
            )


def load_plots(subject: Subject) -> Iterator[Plot]:
    """Latency under each load, and throughput against it where there are several."""
    for (name, kind), along in by_load(subject).items():
        cells = [cell for _, cell in along]
        several = len(along) > 1
        charts = _over_load(subject, along, LOADS[kind]) if several else _at(subject, cells[0])
        key = f"{name}-{kind}"
        if charts:
            yield Plot(
                key=key,
                title=f"Latency by {kind}: {name}",
                findings=_against_zero(subject, cells[-1], (FIRST, "tpot_p50")),
                charts=charts,
                table=_table(subject, cells, LATENCIES, subject.arms),
                note=f"{_RUNS} {defined(LATENCIES)}",
            )
        if charts and several:
            yield _throughput(subject, f"{key}-throughput", f"{name}, by {kind}", cells)


def by_context(subject: Subject) -> Mapping[str, list[tuple[float, Cell]]]:
    """The cells of workloads that have several contexts, by workload (and profile, if several)."""
    found: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
    for cell in subject.cells:
        if cell.point.context is not None:
            key = (cell.point.workload, cell.profile.label)
            found.setdefault(key, []).append((float(cell.point.context), cell))
    several = {key: along for key, along in found.items() if len(along) > 1}
    names = [workload for workload, _ in several]
    return {
        workload if names.count(workload) == 1 else f"{workload} {profile}": along
        for (workload, profile), along in several.items()
    }


def by_load(subject: Subject) -> Mapping[tuple[str, str], list[tuple[float, Cell]]]:
    """The other cells, by point and by kind of load, one of LOADS."""
    taken = [cell for along in by_context(subject).values() for _, cell in along]
    found: dict[tuple[str, str], list[tuple[float, Cell]]] = {}
    for cell in subject.cells:
        if cell not in taken:
            kind = "rate" if cell.profile.open_loop else "concurrency"
            found.setdefault((cell.point.label, kind), []).append((cell.load, cell))
    return found


def _settings(subject: Subject) -> Mapping[str, list[str]]:
    """Encoding → its arms, where it has more than one."""
    found: dict[str, list[str]] = {}
    for arm in subject.others:
        encoding = subject.result.arms[arm].get("encoding", arm)
        found.setdefault(str(encoding), []).append(arm)
    return {encoding: arms for encoding, arms in found.items() if len(arms) > 1}


def _over_context(subject: Subject, key: str, title: str, along: Along, metric: str) -> Plot:
    cells, across = [cell for _, cell in along], "tokens of context"
    charts = []
    if series := measured(subject, along, metric):
        charts.append(lines(column(metric), series, across, plain_tick))
    if series := relative(subject, along, metric):
        head = f"{heading(metric)}, difference to {subject.zero}"
        charts.append(lines(head, series, across, percent_tick, centred=True))
    ends = [cells[-1], cells[0]]
    return Plot(
        key=key,
        title=title,
        findings=tuple(said for cell in ends for said in _against_zero(subject, cell, (metric,))),
        charts=tuple(charts),
        table=_table(subject, cells, (metric,), subject.arms),
        note=f"{_RUNS} {_INTERVAL} {defined([metric])}",
    )


def _over_load(subject: Subject, along: Along, across: str) -> tuple[str, ...]:
    found = {metric: measured(subject, along, metric) for metric in LATENCIES}
    return tuple(
        lines(column(metric), series, across, plain_tick)
        for metric, series in found.items()
        if series
    )


def _at(subject: Subject, cell: Cell) -> tuple[str, ...]:
    """One chart for each latency, of a cell that has no neighbours."""
    found = {metric: rows(subject, cell, metric) for metric in LATENCIES}
    return tuple(
        dots(column(metric), {"": own}, cell.label, plain_tick)
        for metric, own in found.items()
        if own
    )


def _throughput(subject: Subject, key: str, name: str, cells: Sequence[Cell]) -> Plot:
    charts = []
    for metric in ("ttft_p99", "tpot_p99"):
        series = []
        for arm in subject.arms:
            marks = list(_reached(arm, cells, metric))
            if marks:
                series.append(Series(arm, subject.looks[arm], tuple(marks)))
        if series:
            head = f"{column(metric)}, by throughput"
            charts.append(lines(head, series, heading(THROUGHPUT), plain_tick, free=True))
    return Plot(
        key=key,
        title=f"Throughput against latency: {name}",
        findings=_against_zero(subject, cells[-1], (THROUGHPUT,)),
        charts=tuple(charts),
        table=_table(subject, cells, (THROUGHPUT,), subject.arms),
        note=f"A line joins the loads of one arm, lightest first. {defined([THROUGHPUT])}",
    )


def _reached(arm: str, cells: Sequence[Cell], metric: str) -> Iterator[Mark]:
    for cell in cells:
        x, y = cell.spread(arm, THROUGHPUT), cell.spread(arm, metric)
        if x is not None and y is not None:
            told = f"{cell.label}: {shown(THROUGHPUT, x)} tokens/s at {shown(metric, y)} ms"
            yield Mark(x.median, y.median * 1e3, y.low * 1e3, y.high * 1e3, told)


def _against_zero(subject: Subject, cell: Cell, metrics: Sequence[str]) -> tuple[str, ...]:
    """What the other arms cost over the zero; without a zero, what was measured."""
    sentences: list[str] = []
    for metric in metrics:
        found = cell.against(subject.zero, subject.others, metric)
        if subject.zero is not None and found:
            sentences.append(compared(f"{cell.where},", subject.zero, found, metric))
            continue
        for arm in subject.arms:
            if (one := cell.spread(arm, metric)) is not None:
                number = f"{shown(metric, one)} {unit(metric)}"
                sentences.append(f"{cell.where}, {heading(metric)} of {arm} is {number}.")
    # Two metrics that cannot be compared for the same reason say so once.
    return tuple(dict.fromkeys(sentences)) or (f"{cell.where}, nothing was served.",)


def _dearest(cell: Cell, arms: Sequence[str], metric: str) -> str:
    """The dearest of `arms` against the cheapest."""
    medians = {arm: one.median for arm in arms if (one := cell.spread(arm, metric)) is not None}
    if len(medians) < 2:
        return ""
    cheapest, dearest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    return compared(f"{cell.where},", cheapest, cell.against(cheapest, [dearest], metric), metric)


def _table(
    subject: Subject, cells: Sequence[Cell], metrics: Sequence[str], arms: Sequence[str]
) -> Table:
    """One line for each cell and arm: each figure, and its difference to the zero."""
    header = ["at", "arm"]
    for metric in metrics:
        header.append(column(metric))
        if subject.zero is not None:
            header.append(f"over {subject.zero}")
    lines_ = [tuple(header)]
    for cell in cells:
        against = {metric: cell.against(subject.zero, arms, metric) for metric in metrics}
        for arm in arms:
            line = [cell.label, arm]
            for metric in metrics:
                line.append(shown(metric, cell.spread(arm, metric)))
                if subject.zero is not None:
                    found = against[metric].get(arm)
                    line.append("–" if found is None else interval(found))
            lines_.append(tuple(line))
    return lines_
