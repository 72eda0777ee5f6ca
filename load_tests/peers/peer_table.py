"""The comparison of servers: the work sent to each, one figure of it, and the table of all.

Higher is better for some figures (tokens per second), lower for others (seconds, memory). The last
column says how many times better the first system is than the best other one in that row: 1.2 is
a fifth more tokens per second, or the same work in 1/1.2 of the time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ropewalk.load_tests.common.statistics import figures, samples
from ropewalk.load_tests.common.types import Profile, Result, Run
from ropewalk.load_tests.report.differences import difference
from ropewalk.load_tests.report.formatting import digits
from ropewalk.load_tests.workload.loads import Load
from ropewalk.load_tests.workload.workloads import WORKLOADS, Sizes
from ropewalk.report.table import aligned

WEIGHT_BYTES = "weight_bytes"  # key of Result.environment: bytes in bfloat16; 0 if unknown
PROCESSES = "processes"  # key of Result.environment: system → `Lifetime` fields of each round
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What was measured of one process of a system, besides the load."""

    round: int
    start_s: float  # from the start to the end of the first completion
    loaded_bytes: int  # memory held then
    used_bytes: int  # memory held after the runs
    read_bytes_per_s: float  # memory bandwidth of all cores, measured just before and after


@dataclass(frozen=True, slots=True)
class Row:
    """Some work and its figure, which is None for a run in which a request failed."""

    name: str  # in --work
    title: str
    unit: str
    more_is_better: bool
    workload: str
    profile: Profile
    figure: Callable[[Run], float | None]

    @property
    def load(self) -> Load:
        workload = WORKLOADS[self.workload]
        (point,) = workload.points(Sizes())
        return Load(workload, point, self.profile)


def _decode_rate(run: Run) -> float | None:
    found = figures(run).values.get("tpot_p50")
    return 1 / found if found else None


def _prefill_rate(run: Run) -> float | None:
    found = [outcome.prompt_tokens / samples("ttft", [outcome])[0] for outcome in run.outcomes]
    return median(found) if found else None


def _output_rate(run: Run) -> float | None:
    return figures(run).values.get("output_tokens_per_s")


def _seconds(run: Run) -> float:
    return run.ended - run.began


def _closed(name: str, workers: int) -> Row:
    profile = Profile("closed", concurrency=workers)
    title = f"{workers} concurrent, 128 in, 128 out"
    return Row(name, title, "tokens/s", True, "stream", profile, _output_rate)


_SYNC = Profile("sync")
_EIGHT = Profile("closed", concurrency=8)
_ALL = (
    Row("one", "one stream, 128 in, 128 out", "tokens/s", True, "stream", _SYNC, _decode_rate),
    Row("prefill", "prefill of 1,024", "tokens/s", True, "prefill", _SYNC, _prefill_rate),
    _closed("eight", 8),
    _closed("thirty-two", 32),
    Row("shared", "16 sharing 768 tokens", "s", False, "shared-prefix", _EIGHT, _seconds),
)
ROWS: Mapping[str, Row] = {row.name: row for row in _ALL}
# Rows of `Lifetime`: title, unit, field, and how many of the field's units make one.
_LIFETIME = (
    ("start to first completion", "s", "start_s", 1),
    ("memory when loaded", "MiB", "loaded_bytes", _MIB),
    ("memory after the work", "MiB", "used_bytes", _MIB),
)


def sizes(requests_per_worker: int) -> Sizes:
    """For all rows: 16 requests with the one shared prefix, else `requests_per_worker`."""
    return Sizes(prefixes=1, requests_per_prefix=16, requests_per_worker=requests_per_worker)


def rows_from(text: str) -> tuple[Row, ...]:
    """`one,prefill` → these rows. Raises ValueError."""
    for name in (names := text.split(",")):
        if name not in ROWS:
            raise ValueError(f"there is no work {name!r}; use some of {', '.join(ROWS)}")
    return tuple(ROWS[name] for name in dict.fromkeys(names))


def peer_table(result: Result) -> str:
    """Every figure of every system, medians of the rounds, and the first against the best other."""
    systems = list(result.variants)
    lines = [["work", "unit", *systems, "best other", f"{systems[0]} is better by"]]
    for row in ROWS.values():
        found = {name: _by_round(result, name, row) for name in systems}
        if any(found.values()):
            lines.append([row.title, row.unit, *_cells(found, row.more_is_better)])
    if result.environment.get(WEIGHT_BYTES):
        found = {name: _of_bound(result, name) for name in systems}
        if any(found.values()):
            lines.append(["one stream, of the bound", "%", *_cells(found, more_is_better=True)])
    for title, unit, field, scale in _LIFETIME:
        found = {name: _lived(result, name, field, scale) for name in systems}
        if any(found.values()):
            lines.append([title, unit, *_cells(found, more_is_better=False)])
    return "\n".join(aligned(lines, left=2, rule=True))


def _by_round(result: Result, system: str, row: Row) -> dict[int, float]:
    runs = [
        run
        for run in result.runs
        if run.variant == system
        and (run.point.workload, run.profile) == (row.workload, row.profile)
    ]
    good = [run for run in runs if all(outcome.error is None for outcome in run.outcomes)]
    return {run.round: value for run in good if (value := row.figure(run)) is not None}


def _of_bound(result: Result, system: str) -> dict[int, float]:
    """One stream's speed in percent of the rate at which bfloat16 weights can be read."""
    weights = result.environment[WEIGHT_BYTES]
    assert isinstance(weights, int)
    rates = _by_round(result, system, ROWS["one"])
    reading = _lived(result, system, "read_bytes_per_s", weights)
    return {round: 100 * rates[round] / reading[round] for round in rates.keys() & reading}


def _lived(result: Result, system: str, field: str, scale: int) -> dict[int, float]:
    processes = result.environment.get(PROCESSES)
    assert isinstance(processes, dict)
    return {life["round"]: life[field] / scale for life in processes.get(system, ())}


def _cells(found: Mapping[str, Mapping[int, float]], more_is_better: bool) -> list[str]:
    first, *others = found
    shown = [digits(median(one.values())) if one else "–" for one in found.values()]
    measured = {name: median(found[name].values()) for name in others if found[name]}
    if not found[first] or not measured:
        return [*shown, "–", "–"]
    best = (max if more_is_better else min)(measured, key=lambda name: measured[name])
    ratios = [
        found[first][round] / found[best][round] for round in found[first].keys() & found[best]
    ]
    return [*shown, best, _times([ratio if more_is_better else 1 / ratio for ratio in ratios])]


def _times(ratios: Sequence[float]) -> str:
    """Geometric mean and 95 % interval; no interval with too few."""
    if not ratios:
        return "–"
    logs = np.log(np.array(ratios))
    found = difference([logs], "output_tokens_per_s")
    if found.verdict == "unknown":
        return f"{math.exp(float(logs.mean())):.2f} (too few runs for an interval)"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
