"""A result as text for a terminal: one table per workload, the findings, the warnings."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ropewalk.load_tests.common.types import Result
from ropewalk.load_tests.report.cells import Cell
from ropewalk.load_tests.report.formatting import column, defined, heading, interval, number
from ropewalk.load_tests.report.plot import Subject, subject
from ropewalk.load_tests.report.plots import plots
from ropewalk.report.table import aligned

_METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "output_tokens_per_s")
_MAIN = "tpot_p50"  # compared with the baseline
_FEWEST = 100  # requests of a run that has a p99; of fewer it is nearly the slowest


def tables(result: Result) -> str:
    """All text that is printed at the end of a load test."""
    measured = subject(result)
    by_workload = groupby(measured.cells, key=lambda cell: cell.point.workload)
    parts = [_table(measured, list(cells)) for _, cells in by_workload]
    sentences = [f"- {plot.title}. {plot.findings[0]}" for plot in plots(result) if plot.findings]
    parts.append("\n".join(sentences) or "Nothing was measured.")
    if warnings := [f"warning: {sentence}" for sentence in all_warnings(result)]:
        parts.append("\n".join(warnings))
    parts.append(
        f"Medians of the runs; no p99 where a run served fewer than {_FEWEST} requests. "
        f"{defined(_METRICS)}"
    )
    return "\n\n".join(parts)


def all_warnings(result: Result) -> Iterator[str]:
    """The result's warnings, then disagreements of client and server, each once."""
    yield from result.warnings
    counts: dict[str, int] = {}
    for run in result.runs:
        for sentence in run.server.disagreements if run.server is not None else ():
            counts[f"{run.variant}: {sentence}"] = counts.get(f"{run.variant}: {sentence}", 0) + 1
    for sentence, count in counts.items():
        yield sentence if count == 1 else f"{sentence} ({count} runs)"


def _table(subject: Subject, cells: Sequence[Cell]) -> str:
    header = ["", "variant", "ok/sent", *map(column, _METRICS)]
    if subject.baseline is not None:
        header.append(f"{heading(_MAIN)} over {subject.baseline}")
    rows = [header]
    for cell in cells:
        against = cell.against(subject.baseline, subject.others, _MAIN)
        for i, (variant, runs) in enumerate(cell.runs.items()):
            outcomes = [outcome for run in runs for outcome in run.outcomes]
            good = sum(outcome.error is None for outcome in outcomes)
            row = ["" if i else cell.label, variant, f"{good}/{len(outcomes)}"]
            row += [_median(cell, variant, metric) for metric in _METRICS]
            if subject.baseline is not None:
                row.append(interval(against[variant]) if variant in against else "–")
            rows.append(row)
    return "\n".join(aligned(rows, left=2, rule=True))


def _median(cell: Cell, variant: str, metric: str) -> str:
    served = [one.served for one in cell.figures[variant].values()]
    if metric.endswith("_p99") and min(served) < _FEWEST:
        return "–"
    found = cell.spread(variant, metric)
    return "–" if found is None else number(metric, found.value)
