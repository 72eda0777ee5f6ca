"""Plots of the servers' own counters: cache behaviour, positional work, context shifts."""

from collections.abc import Callable, Iterator, Mapping

from ropewalk.load_tests.report.charts import bars, dots, plain
from ropewalk.load_tests.report.formatting import digits, listed
from ropewalk.load_tests.report.plot import Subject
from ropewalk.report.figure import Picture
from ropewalk.report.page import Section, Table
from ropewalk.report.statistics import Estimate, spread

Counters = Mapping[str, float]
Figure = Callable[[Counters], float | None]  # None if the counters for it are missing


def counted(counters: Counters, name: str, labels: str = "") -> float:
    """The increase of `ropewalk_NAME` over all its series, or over those with these labels."""
    family = f"ropewalk_{name}"
    return sum(
        value
        for key, value in counters.items()
        if key.partition("{")[0] == family and labels in key
    )


def per_token(name: str) -> Figure:
    """A counter per computed token: prompt tokens that were not cached, and generated ones.

    The last token of an answer is only returned, never computed.
    """

    def figure(counters: Counters) -> float | None:
        computed = counted(counters, "prompt_tokens_total", 'source="computed"')
        ends = counted(counters, "requests_total")
        tokens = computed + counted(counters, "generated_tokens_total") - ends
        return counted(counters, name) / tokens if tokens > 0 else None

    return figure


def over(name: str, base: str, factor: float = 1.0) -> Figure:
    """The ratio of one counter to another."""

    def figure(counters: Counters) -> float | None:
        below = counted(counters, base)
        return counted(counters, name) / below * factor if below else None

    return figure


def rewritten(counters: Counters) -> float | None:
    """0 without the counter: one that did not grow is absent. None if the server is no Ropewalk."""
    told = counted(counters, "kv_written_bytes_total")
    return counted(counters, "kv_rewritten_entries_total") if told else None


CACHE: Mapping[str, Figure] = {
    "entries rewritten": rewritten,
    "bytes written per computed token": per_token("kv_written_bytes_total"),
    "prompt tokens found in the prefix cache, %": over(
        "prefix_cache_hit_tokens_total", "prefix_cache_queried_tokens_total", factor=100
    ),
    "rotations per computed token": per_token("position_rotations_total"),
    "scores biased per computed token": per_token("position_bias_values_total"),
    "bias values built per computed token": per_token("position_bias_built_total"),
}
SHIFT: Mapping[str, Figure] = {
    "keys rewritten per shift": over("kv_rewritten_entries_total", "context_shifts_total"),
    "bytes moved per shift": over("kv_moved_bytes_total", "context_shifts_total"),
}
_SHIFT_SECONDS = over("context_shift_seconds_sum", "context_shift_seconds_count")
_CACHE_NOTE = (
    "From the counters of each server, over all runs of the workload. A computed token is a prompt "
    "token that was not in the prefix cache, or a generated one that is not the last of its "
    "answer. An entry is one key or value vector of one layer and head. Rotations are counted per "
    "query or key of one head and layer, biased scores per score of one head and layer; both are "
    "calculated from context lengths."
)
_SHIFT_NOTE = (
    "From the counters of each server. The time is that of shortening one cached context, for "
    "which the whole step waits: the median of the runs' means, and their range."
)


def cache_plots(subject: Subject) -> Iterator[Section]:
    """What each encoding writes, rewrites, finds in the cache and computes for positions."""
    for workload, totals in _totals(subject).items():
        found = {name: _of(totals, figure) for name, figure in CACHE.items()}
        found = {name: values for name, values in found.items() if values}
        if found:
            yield Section(
                key=f"{workload}-cache",
                title=f"Cache and positional work: {workload}",
                findings=tuple(_said(name, values) for name, values in found.items()),
                pictures=_bars(subject, found),
                table=_table(found),
                note=_CACHE_NOTE,
            )


def shift_plots(subject: Subject) -> Iterator[Section]:
    """What one context shift costs each encoding, in the workloads that had any."""
    for workload, totals in _totals(subject).items():
        shifts = {variant: counted(one, "context_shifts_total") for variant, one in totals.items()}
        if not any(shifts.values()):
            continue
        found = {name: _of(totals, figure) for name, figure in SHIFT.items()}
        seconds = _seconds(subject, workload)
        charts = _bars(subject, found)
        if seconds:
            head = "time of one shift, ms"
            charts = (dots(head, {"": subject.rows(seconds)}, "milliseconds", plain), *charts)
        means = {variant: one.value for variant, one in seconds.items()}
        table = _table({"shifts": shifts, "ms per shift": means, **found})
        said = [_said(name, values) for name, values in found.items()]
        yield Section(
            key=f"{workload}-shift",
            title=f"Cost of a context shift: {workload}",
            findings=(*_dearest_shift(seconds), *said),
            pictures=charts,
            table=table,
            note=_SHIFT_NOTE,
        )


def _totals(subject: Subject) -> Mapping[str, Mapping[str, Counters]]:
    """Workload → variant → counters summed over its runs, where servers have counters."""
    totals: dict[str, dict[str, dict[str, float]]] = {}
    # In the order of variants, because the runs of a round are in random order.
    for run in (run for variant in subject.variants for run in subject.runs(variant)):
        if run.server is not None:
            own = totals.setdefault(run.point.workload, {}).setdefault(run.variant, {})
            for key, value in run.server.counters.items():
                own[key] = own.get(key, 0.0) + value
    return totals


def _of(totals: Mapping[str, Counters], figure: Figure) -> dict[str, float]:
    found = {variant: figure(counters) for variant, counters in totals.items()}
    return {variant: value for variant, value in found.items() if value is not None}


def _seconds(subject: Subject, workload: str) -> dict[str, Estimate]:
    """Milliseconds per shift, for each variant."""
    found: dict[str, Estimate] = {}
    for variant in subject.variants:
        views = [
            run.server.counters
            for run in subject.runs(variant)
            if run.point.workload == workload and run.server is not None
        ]
        means = [mean * 1e3 for view in views if (mean := _SHIFT_SECONDS(view)) is not None]
        if one := spread(means):
            found[variant] = one
    return found


def _bars(subject: Subject, found: Mapping[str, Mapping[str, float]]) -> tuple[Picture, ...]:
    """One chart for each figure that any variant has above zero."""
    return tuple(
        bars(name, subject.rows({variant: Estimate(n, n, n) for variant, n in values.items()}))
        for name, values in found.items()
        if any(values.values())
    )


def _table(found: Mapping[str, Mapping[str, float]]) -> Table:
    variants = list(dict.fromkeys(variant for values in found.values() for variant in values))
    lines = [
        (
            variant,
            *(digits(values[variant]) if variant in values else "–" for values in found.values()),
        )
        for variant in variants
    ]
    return [("variant", *found), *lines]


def _said(name: str, values: Mapping[str, float]) -> str:
    """Which variants have which number: "Entries rewritten: 3,072 for rope, 0 for the others."."""
    groups: dict[str, list[str]] = {}
    for variant, value in sorted(values.items(), key=lambda pair: -pair[1]):
        groups.setdefault(digits(value), []).append(variant)
    title = name[0].upper() + name[1:]
    if len(groups) == 1:
        (number,) = groups
        return f"{title}: {number} for every variant." if len(values) > 1 else f"{title}: {number}."
    largest = max(reversed(groups), key=lambda number: len(groups[number]))
    parts = [
        f"{number} for {listed(variants)}"
        for number, variants in groups.items()
        if number != largest
    ]
    if len(parts) > 2:  # the table has them all
        return f"{title}: from {next(reversed(groups))} to {next(iter(groups))}."
    others = "the others" if len(groups[largest]) > 1 else groups[largest][0]
    return f"{title}: {', '.join(parts)}, {largest} for {others}."


def _dearest_shift(seconds: Mapping[str, Estimate]) -> Iterator[str]:
    if len(seconds) > 1:
        cheapest, *_, dearest = sorted(seconds, key=lambda variant: seconds[variant].value)
        times = " and ".join(_time(variant, seconds[variant]) for variant in (dearest, cheapest))
        yield f"A shift takes {times}."


def _time(variant: str, found: Estimate) -> str:
    """4.1 ms (3.9 to 4.4) under rope"""
    ends = "" if found.low == found.high else f" ({digits(found.low)} to {digits(found.high)})"
    return f"{digits(found.value)} ms{ends} under {variant}"
