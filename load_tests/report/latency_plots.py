"""Plots of what clients saw: latency by context, load, bias form and key storage; throughput."""

from collections.abc import Iterator, Mapping, Sequence

from ropewalk.load_tests.report.cells import Cell
from ropewalk.load_tests.report.charts import Mark, dots, lines, plain
from ropewalk.load_tests.report.formatting import column, compared, defined, heading, interval
from ropewalk.load_tests.report.plot import (
    Axis,
    Subject,
    chart,
    context_axes,
    load_axes,
    measured,
    percent_tick,
    quantity,
    relative,
    shown,
)
from ropewalk.report.page import Section, Table

STEP, FIRST, THROUGHPUT = "itl_p50", "ttft_p50", "output_tokens_per_s"
LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
_RUNS = "A mark is the median of the runs; its bar reaches from the lowest to the highest."
_INTERVAL = (
    "The bar of a difference is its 95 % interval over the rounds; a hollow mark means no "
    "difference, allowing for the number of variants compared. Large differences compress the axis."
)


def context_plots(subject: Subject) -> Iterator[Section]:
    """Latency over the length of the context, for each workload that varies it."""
    for axis in context_axes(subject):
        name = axis.name
        yield _over_context(subject, name, f"Step latency by context: {name}", axis, STEP)
        key, title = f"{name}-first", f"Time to first token by context: {name}"
        yield _over_context(subject, key, title, axis, FIRST)


def setting_plots(subject: Subject) -> Iterator[Section]:
    """Bias forms and key storages of one encoding, against the baseline and against each other."""
    cells = [cell for axis in context_axes(subject) for cell in axis.cells]
    cells = cells or [cell for cell in subject.cells if not cell.profile.open_loop]
    for encoding, variants in _settings(subject).items():
        base = subject.baseline or variants[0]
        charts = []
        for metric in (STEP, FIRST):
            groups = {
                cell.label: relative(subject, Axis("", "context", [cell]), metric, base, variants)
                for cell in cells
            }
            if groups := {label: found for label, found in groups.items() if found}:
                head = f"{encoding}: {heading(metric)}, difference to {base}"
                charts.append(dots(head, groups, "", percent_tick, centred=True))
        if charts:
            said = [_dearest(cells[-1], variants, metric) for metric in (STEP, FIRST)]
            yield Section(
                key=f"{encoding}-settings",
                title=f"Bias forms and key storages: {encoding}",
                findings=tuple(filter(None, said)),
                pictures=tuple(charts),
                table=_table(subject, cells, (STEP, FIRST), variants),
                note=f"{_INTERVAL} {defined((STEP, FIRST))}",
            )


def load_plots(subject: Subject) -> Iterator[Section]:
    """Latency under each load, and throughput against it where there are several."""
    for axis in load_axes(subject):
        charts = [
            chart(column(metric), series, axis)
            for metric in LATENCIES
            if (series := measured(subject, axis, metric))
        ]
        if not charts:
            continue
        yield Section(
            key=f"{axis.name}-{axis.by}",
            title=f"Latency by {axis.by}: {axis.name}",
            findings=_against_baseline(subject, axis.cells[-1], (FIRST, "tpot_p50")),
            pictures=tuple(charts),
            table=_table(subject, axis.cells, LATENCIES, subject.variants),
            note=f"{_RUNS} {defined(LATENCIES)}",
        )
        if len(axis.cells) > 1:
            yield _throughput(subject, axis)


def _settings(subject: Subject) -> Mapping[str, list[str]]:
    """Encoding → its variants, where it has more than one."""
    found: dict[str, list[str]] = {}
    for variant in subject.others:
        encoding = subject.result.variants[variant].get("encoding", variant)
        found.setdefault(str(encoding), []).append(variant)
    return {encoding: variants for encoding, variants in found.items() if len(variants) > 1}


def _over_context(subject: Subject, key: str, title: str, axis: Axis, metric: str) -> Section:
    charts = []
    if series := measured(subject, axis, metric):
        charts.append(lines(column(metric), series, axis.title, plain))
    if series := relative(subject, axis, metric, subject.baseline, subject.others):
        head = f"{heading(metric)}, difference to {subject.baseline}"
        charts.append(lines(head, series, axis.title, percent_tick, centred=True))
    ends = [axis.cells[-1], axis.cells[0]]
    return Section(
        key=key,
        title=title,
        findings=tuple(
            said for cell in ends for said in _against_baseline(subject, cell, (metric,))
        ),
        pictures=tuple(charts),
        table=_table(subject, axis.cells, (metric,), subject.variants),
        note=f"{_RUNS} {_INTERVAL} {defined([metric])}",
    )


def _throughput(subject: Subject, axis: Axis) -> Section:
    charts = []
    for metric in ("ttft_p99", "tpot_p99"):
        reached = {
            variant: list(_reached(variant, axis.cells, metric)) for variant in subject.variants
        }
        if series := subject.series(reached):
            head = f"{column(metric)}, by throughput"
            charts.append(lines(head, series, heading(THROUGHPUT), plain, free=True))
    return Section(
        key=f"{axis.name}-{axis.by}-throughput",
        title=f"Throughput against latency: {axis.name}, by {axis.by}",
        findings=_against_baseline(subject, axis.cells[-1], (THROUGHPUT,)),
        pictures=tuple(charts),
        table=_table(subject, axis.cells, (THROUGHPUT,), subject.variants),
        note=f"A line joins the loads of one variant, lightest first. {defined([THROUGHPUT])}",
    )


def _reached(variant: str, cells: Sequence[Cell], metric: str) -> Iterator[Mark]:
    for cell in cells:
        x, y = cell.spread(variant, THROUGHPUT), cell.spread(variant, metric)
        if x is not None and y is not None:
            told = f"{cell.label}: {quantity(THROUGHPUT, x)} at {quantity(metric, y)}"
            yield Mark(y.times(1e3), told, x=x.value)


def _against_baseline(subject: Subject, cell: Cell, metrics: Sequence[str]) -> tuple[str, ...]:
    """What the other variants cost over the baseline; without one, what was measured."""
    sentences: list[str] = []
    for metric in metrics:
        found = cell.against(subject.baseline, subject.others, metric)
        if subject.baseline is not None and found:
            sentences.append(compared(f"{cell.where},", subject.baseline, found, metric))
            continue
        for variant in subject.variants:
            if (one := cell.spread(variant, metric)) is not None:
                what = f"{heading(metric)} of {variant} is {quantity(metric, one)}"
                sentences.append(f"{cell.where}, {what}.")
    # Metrics that cannot be compared for the same reason give one sentence.
    return tuple(dict.fromkeys(sentences)) or (f"{cell.where}, nothing was served.",)


def _dearest(cell: Cell, variants: Sequence[str], metric: str) -> str:
    """The slowest of `variants` compared with the fastest."""
    medians = {
        variant: one.value
        for variant in variants
        if (one := cell.spread(variant, metric)) is not None
    }
    if len(medians) < 2:
        return ""
    cheapest, dearest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    return compared(f"{cell.where},", cheapest, cell.against(cheapest, [dearest], metric), metric)


def _table(
    subject: Subject, cells: Sequence[Cell], metrics: Sequence[str], variants: Sequence[str]
) -> Table:
    """One line per cell and variant: each figure, and its difference from the baseline."""
    header = ["at", "variant"]
    for metric in metrics:
        header.append(column(metric))
        if subject.baseline is not None:
            header.append(f"over {subject.baseline}")
    lines_ = [tuple(header)]
    for cell in cells:
        against = {metric: cell.against(subject.baseline, variants, metric) for metric in metrics}
        for variant in variants:
            line = [cell.label, variant]
            for metric in metrics:
                line.append(shown(metric, cell.spread(variant, metric)))
                if subject.baseline is not None:
                    found = against[metric].get(variant)
                    line.append("–" if found is None else interval(found))
            lines_.append(tuple(line))
    return lines_
