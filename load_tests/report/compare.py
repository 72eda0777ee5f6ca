"""`ropewalk bench compare`: finds what changed between two results of the same load test."""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ropewalk.load_tests.common.parser import Parser
from ropewalk.load_tests.common.statistics import METRICS, RATES, Figures
from ropewalk.load_tests.common.types import Result, Run
from ropewalk.load_tests.report.cells import Cell, cells
from ropewalk.load_tests.report.differences import (
    Difference,
    client_late,
    corrected,
    difference,
    log_ratios,
)
from ropewalk.load_tests.report.formatting import interval, number, signed
from ropewalk.load_tests.report.result import BadResult, read
from ropewalk.report.statistics import Estimate, Floats
from ropewalk.report.table import aligned

_SHOWN = ("ttft_p50", "tpot_p50", "output_tokens_per_s")
_SAME = ("processor", "cores")  # of the environment
# Arguments that make another test, but for those that labels of points and variants show.
_ALIKE = (
    *("serve", "context", "dialect", "ignore_eos", "prompt_form", "prompt_tokens"),
    *("output_tokens", "prefill_tokens", "prefix_tokens", "prefixes", "requests_per_prefix"),
    *("requests_per_worker", "arrivals"),
)
_CONDITION = re.compile(r"(?P<metric>\w+)\s*(?P<side>>\s*\+|<\s*-)\s*(?P<number>\d+(\.\d+)?)\s*%")

_DESCRIPTION = """\
Compare two results of `ropewalk bench`: what changed from the first to the second?

Variants and points are matched by their labels. If both results have the same baseline, it is
compared by its absolute figures, and every other variant by its ratio to the baseline of its own
result: a machine that was slower that day slows both, so only the baseline's line shows it. Each
interval is 95 % on its own; verdicts allow for the number of comparisons. Each result needs at
least 3 runs of a cell, and 5 or more find smaller changes.
"""
_EPILOG = """\
a condition is METRIC>+N% or METRIC<-N%. It holds where the change is beyond N and its verdict is
not "no difference". Metrics: ttft, ttft_from_wire, itl, tpot and e2e, each with _p50, _p90 or _p99,
and output_tokens_per_s, total_tokens_per_s. A p99 of fewer than some hundred requests in a run is
nearly the slowest one.

examples:
  ropewalk bench compare before/result.json after/result.json
  ropewalk bench compare a.json b.json --fail-on 'tpot_p50>+10%' --fail-on 'ttft_p50>+20%'
  ropewalk bench compare a.json b.json --fail-on 'output_tokens_per_s<-5%' --plain

Exit status: 0 when no condition holds, 1 when one does, 2 when a variant in a
condition allows no conclusion, is missing in the second result, fails more
often there or serves nothing, when a condition is given and the results are
of tests with different arguments, or a file cannot be used.
"""


@dataclass(frozen=True, slots=True)
class Condition:
    """A threshold for a change."""

    text: str
    metric: str
    above: bool  # it holds for a change above `change`; else below
    change: float  # relative: 0.1 is a tenth more, -0.1 a tenth less

    def holds(self, found: Difference) -> bool:
        """Whether the change is significant and beyond the threshold."""
        if found.verdict not in ("slower", "faster"):
            return False
        change = found.value - 1
        return change > self.change if self.above else change < self.change


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one variant in one cell of both results."""

    cell: str
    variant: str
    metric: str
    before: Estimate | None  # of the runs; None if nothing was served
    after: Estimate | None
    over: str | None  # the baseline, where ratios to it are compared
    found: Difference


def parse_condition(text: str) -> Condition:
    """`tpot_p99>+10%`. Raises argparse.ArgumentTypeError."""
    match = _CONDITION.fullmatch(text.strip())
    if match is None or match["metric"] not in METRICS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no condition; write one such as 'tpot_p99>+10%' (--help lists metrics)"
        )
    share = float(match["number"]) / 100
    above = match["side"][0] == ">"
    return Condition(text, match["metric"], above, share if above else -share)


def parser() -> argparse.ArgumentParser:
    options = Parser(
        prog="ropewalk bench compare",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("before", type=Path, metavar="A.json")
    options.add_argument("after", type=Path, metavar="B.json")
    options.add_argument(
        "--fail-on",
        type=parse_condition,
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with status 1 if this holds; may be given several times",
    )
    options.add_argument(
        "--plain",
        action="store_true",
        help="compare absolute figures, not ratios to the baseline",
    )
    return options


def _refused(reason: str) -> int:
    print(f"ropewalk bench compare: {reason}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0: no condition holds; 1: one does; 2: no conclusion."""
    args = parser().parse_args(argv)
    try:
        before, after = read(args.before), read(args.after)
    except BadResult as error:
        return _refused(str(error))
    except OSError as error:
        return _refused(f"{error.filename} cannot be read ({error.strerror}); give a result.json")
    conditions: Sequence[Condition] = args.fail_on
    metrics = tuple(dict.fromkeys((*_SHOWN, *(each.metric for each in conditions))))
    baseline = before.baseline if before.baseline == after.baseline and not args.plain else None
    old, new = _by_label(before), _by_label(after)
    rows = _compared(old, new, metrics, baseline)
    if not rows:
        return _refused(
            "no variant was measured at the same point in both; compare results of the same command"
        )
    print(_table(rows))
    others = list(_others(before, after))
    for note in (
        *_reasons(rows),
        *_left_out("first", before, after, [label for label in old if label not in new]),
        *_left_out("second", after, before, [label for label in new if label not in old]),
        *_machines(before, after),
        *(f"The results are of different tests: {each}." for each in others),
    ):
        print(note)
    if others and conditions:
        print(f"nothing can be concluded about tests with {'; '.join(others)}")
        return 2
    return _conclude(rows, list(_doubts(old, new)), conditions)


def _by_label(result: Result) -> dict[str, Cell]:
    return {f"{cell.point.label} {cell.profile.label}": cell for cell in cells(result)}


def _compared(
    old: Mapping[str, Cell], new: Mapping[str, Cell], metrics: Sequence[str], baseline: str | None
) -> list[Row]:
    """Every figure that both results have; verdicts are corrected for their number."""
    rows = [
        row
        for label, cell in old.items()
        if label in new
        for row in _rows(label, cell, new[label], metrics, baseline)
    ]
    verdicts = corrected([row.found for row in rows])
    return [replace(row, found=found) for row, found in zip(rows, verdicts, strict=True)]


def _rows(
    label: str, before: Cell, after: Cell, metrics: Sequence[str], baseline: str | None
) -> Iterator[Row]:
    for variant in before.runs:
        if variant not in after.runs:
            continue
        over = baseline if variant != baseline else None
        for metric in metrics:
            old, new = before.spread(variant, metric), after.spread(variant, metric)
            if old is None and new is None:
                continue
            found = _change(before, after, variant, over, metric)
            yield Row(label, variant, metric, old, new, over, found)


def _change(before: Cell, after: Cell, variant: str, over: str | None, metric: str) -> Difference:
    samples: list[Floats] = []
    for cell in (before, after):
        mine, its = cell.figures[variant], cell.figures.get(over or "", {})
        if late := client_late((*mine.values(), *its.values())):
            return late
        samples.append(_logs(mine, metric) if over is None else log_ratios(its, mine, metric))
    return difference(samples, metric)


def _logs(found: Mapping[int, Figures], metric: str) -> Floats:
    values = [one.values.get(metric) for one in found.values()]
    return np.array([math.log(value) for value in values if value])


def _table(rows: Sequence[Row]) -> str:
    lines = [["point", "variant", "metric", "before", "after", "change, %", "over"]]
    for row in rows:
        shown = [_median(row.before, row.metric), _median(row.after, row.metric)]
        change = [interval(row.found), row.over or "–"]
        lines.append([row.cell, row.variant, row.metric, *shown, *change])
    return "\n".join(aligned(lines, left=3, rule=True))


def _median(found: Estimate | None, metric: str) -> str:
    if found is None:
        return "–"
    return number(metric, found.value) + ("" if metric in RATES else " ms")


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """The reasons for unknown verdicts, each once."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.found.verdict == "unknown":
            reasons.setdefault(row.found.reason, []).append(f"{row.cell} {row.variant}")
    for reason, places in reasons.items():
        yield f"Unknown for {', '.join(dict.fromkeys(places))}: {reason}."


def _left_out(name: str, mine: Result, its: Result, missing: Sequence[str]) -> Iterator[str]:
    """What was not compared of one result, and what failed in it."""
    if only := [variant for variant in mine.variants if variant not in its.variants]:
        yield f"Only in the {name} result: {', '.join(only)}."
    if missing:
        yield f"Measured only in the {name} result: {', '.join(missing)}."
    failed = Counter(run.variant for run in mine.runs for o in run.outcomes if o.error is not None)
    for variant, count in failed.items():
        yield f"{count} requests of {variant} failed in the {name} result."


def _machines(before: Result, after: Result) -> Iterator[str]:
    for name in _SAME:
        old, new = before.environment.get(name), after.environment.get(name)
        if old != new:
            yield f"Different {name}: {old} and {new}; the results come from different machines."


def _others(before: Result, after: Result) -> Iterator[str]:
    """Arguments that count and differ, of those that both have: `--prompt-tokens 128 and 256`."""
    kinds = {run.profile.kind for result in (before, after) for run in result.runs}
    idle = {"requests_per_worker"} if kinds.isdisjoint(("sync", "closed")) else set()
    idle |= {"arrivals"} if kinds <= {"sync", "closed"} else set()
    for name in _ALIKE:
        old, new = before.arguments.get(name), after.arguments.get(name)
        # What one leaves to the default may be what the other says, and the path of a shape is an
        # address: the same file may lie elsewhere.
        same = old == new or None in (old, new) or (_is_path(old) and _is_path(new))
        if not same and name not in idle:
            yield f"--{name.replace('_', '-')} {old} and {new}"


def _is_path(serve: object) -> bool:
    return isinstance(serve, str) and serve.endswith(".json")


def _doubts(old: Mapping[str, Cell], new: Mapping[str, Cell]) -> Iterator[str]:
    """What of the first result the second lacks, or has only of the requests that survived."""
    for label, before in old.items():
        for variant, runs in before.runs.items():
            after = new[label].runs.get(variant) if label in new else None
            if after is None:
                yield f"{label} {variant}, which the second result lacks"
            elif _failed(after) == 1:
                yield f"{label} {variant}, of which the second result served nothing"
            elif _failed(after) > _failed(runs):
                yield f"{label} {variant}, which fails more often in the second result"


def _failed(runs: Sequence[Run]) -> float:
    """The share of the requests."""
    errors = [outcome.error for run in runs for outcome in run.outcomes]
    return sum(error is not None for error in errors) / max(1, len(errors))


def _conclude(rows: Sequence[Row], doubts: Sequence[str], conditions: Sequence[Condition]) -> int:
    """Prints whether each condition holds; returns the exit status."""
    status = 0
    for condition in conditions:
        mine = [row for row in rows if row.metric == condition.metric]
        held = [row for row in mine if condition.holds(row.found)]
        open_ = [row for row in mine if row.found.verdict == "unknown"]
        for row in held:
            print(f"{condition.text} holds: {row.cell}, {row.variant}: {interval(row.found)}")
        if held:
            status = 1
        elif open_ or doubts or not mine:
            where = [*(f"{row.cell} {row.variant}" for row in open_), *doubts]
            print(
                f"{condition.text}: nothing can be concluded about "
                f"{'; '.join(where) or 'any variant'}"
            )
            status = status or 2
        else:
            print(f"{condition.text} does not hold{_hidden(mine, condition)}")
    return status


def _hidden(rows: Sequence[Row], condition: Condition) -> str:
    """The largest change in the condition's direction that chance could have covered."""
    same = [row for row in rows if row.found.verdict == "no difference"]
    if not same:
        return ""
    if condition.above:
        row = max(same, key=lambda row: row.found.high)
        end = row.found.high
    else:
        row = min(same, key=lambda row: row.found.low)
        end = row.found.low
    return f"; {signed(end)} % could hide behind no difference: {row.cell}, {row.variant}"
