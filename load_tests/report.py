"""Runs → an aligned table, medians with their spread, and one JSON object. Prints nothing."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from load_tests.measure import RunFigures

SCHEMA = 1
DEFINITIONS = (
    "Median of the runs (lowest–highest). TTFT: intended start to first chunk with text. "
    "TPOT: (end − first text) / (tokens − 1)."
)
HEADER = (
    "workload",
    "ok/sent",
    "output tok/s",
    "prompt tok/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "TPOT p50 ms",
    "total s",
    "other CPU %",
)
_RATIOS = (
    ("output tok/s ×", "output_tokens_per_s"),
    ("TTFT p50 ×", "ttft_p50_ms"),
    ("TPOT p50 ×", "tpot_p50_ms"),
    ("total s ×", "total_s"),
)
_LAG_LIMIT = 0.05  # of the TTFT: above it the client was too slow to measure this server


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of one figure over the runs."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        middle = _digits(self.median)
        if self.low == self.high:
            return middle
        return f"{middle} ({_digits(self.low)}–{_digits(self.high)})"


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table: a label and the runs behind it."""

    label: str
    runs: tuple[RunFigures, ...]

    def spread(self, name: str) -> Spread | None:
        """Over the runs; None when a run does not have this figure."""
        return spread([getattr(run, name) for run in self.runs])

    def other_cpu(self) -> Spread | None:
        return spread([None if run.cpu is None else run.cpu.other * 100 for run in self.runs])


def spread(values: Sequence[float | None]) -> Spread | None:
    """Median and range; None when there are no values or one is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) != len(values):
        return None
    return Spread(median(known), min(known), max(known))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def results_table(cells: Sequence[Cell]) -> str:
    """The main table: one line a cell."""
    return table(HEADER, [_row(cell) for cell in cells])


def ratio_table(ours: Sequence[Cell], theirs: Sequence[Cell]) -> str:
    """Ours over theirs, line by line: above 1 is more tokens, below 1 is less waiting.

    A ratio is that of the medians; in brackets the lowest and highest over runs of the same turn.
    """
    header = ("workload", *(title for title, _ in _RATIOS))
    rows = [
        [mine.label, *(_ratio(mine, other, name) for _, name in _RATIOS)]
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return table(header, rows)


def warnings(cells: Sequence[Cell]) -> list[str]:
    """What makes the figures doubtful, one sentence each."""
    found: list[str] = []
    for cell in cells:
        for error, count in _errors(cell).items():
            found.append(f"{cell.label}: {count} failed: {error}")
        off = sum(run.prompt_tokens_off for run in cell.runs)
        if off:
            found.append(f"{cell.label}: the server counts other prompt lengths in {off} requests.")
        if any(run.lag_p99_ms > _LAG_LIMIT * run.ttft_p50_ms for run in cell.runs):
            found.append(f"{cell.label}: the client sent late; its latencies prove nothing.")
    return found


def as_json(kind: str, arguments: Mapping[str, object], cells: Sequence[Cell]) -> dict[str, object]:
    """Everything measured, ready for `json.dumps`."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
        },
        "arguments": dict(arguments),
        "cells": [
            {"label": cell.label, "runs": [asdict(run) for run in cell.runs]} for cell in cells
        ],
    }


def write_json(path: Path, result: Mapping[str, object]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _row(cell: Cell) -> list[str]:
    sent = sum(run.requests for run in cell.runs)
    failed = sum(run.failed for run in cell.runs)
    figures = [
        cell.spread("output_tokens_per_s"),
        cell.spread("prompt_tokens_per_s"),
        cell.spread("ttft_p50_ms"),
        cell.spread("ttft_p99_ms"),
        cell.spread("tpot_p50_ms"),
        cell.spread("total_s"),
        cell.other_cpu(),
    ]
    shown = ["–" if figure is None else str(figure) for figure in figures]
    return [cell.label, f"{sent - failed}/{sent}", *shown]


def _ratio(mine: Cell, other: Cell, name: str) -> str:
    upper, lower = mine.spread(name), other.spread(name)
    # All tokens in one chunk make a time per token of zero.
    if upper is None or lower is None or lower.low == 0:
        return "–"
    pairs = zip(mine.runs, other.runs, strict=True)
    by_turn = [getattr(a, name) / getattr(b, name) for a, b in pairs]
    return str(Spread(upper.median / lower.median, min(by_turn), max(by_turn)))


def _errors(cell: Cell) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in cell.runs:
        for error, count in run.errors.items():
            counts[error] = counts.get(error, 0) + count
    return counts


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
