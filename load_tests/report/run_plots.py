"""Plots of the load test itself: its failures, its own lag, and what ran when."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ropewalk.load_tests.common.types import Run
from ropewalk.load_tests.report.charts import Row, Span, bars, dots, plain, timeline
from ropewalk.load_tests.report.formatting import digits, percent
from ropewalk.load_tests.report.plot import Plot, Subject, percent_tick
from ropewalk.report.figure import INK, Look
from ropewalk.report.statistics import Estimate, spread

_DRIFT_METRICS = ("itl_p50", "ttft_p50")  # the first of these that a cell has
_MINUTE = 60.0
_BLOCK = Look(INK, "o", "-")


def client_plots(subject: Subject) -> Iterator[Plot]:
    """How late the client sent, and what failed: whether the other figures are reliable."""
    lags = {arm: _lag(subject, arm) for arm in subject.arms}
    rows = [subject.row(arm, lag) for arm, lag in lags.items() if lag is not None]
    if not rows:
        return
    charts = [dots("client lag p99, ms", {"": rows}, "milliseconds late", plain)]
    sent = {arm: sum(len(run.outcomes) for run in _runs(subject, arm)) for arm in subject.arms}
    failed = {arm: _reasons(_runs(subject, arm)) for arm in subject.arms}
    if any(failed.values()):
        counts = {arm: reasons.total() for arm, reasons in failed.items()}
        shares = [
            subject.row(arm, Estimate(count, count, count), f"{count:,} of {sent[arm]:,}")
            for arm, count in counts.items()
        ]
        charts.append(bars("requests failed", shares))
    table = [("arm", "sent", "failed", "lag p99, ms", "reasons")]
    for arm in subject.arms:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in failed[arm].most_common())
        lag = lags[arm]
        number = "–" if lag is None else f"{digits(lag.value)} (at most {digits(lag.high)})"
        count = f"{failed[arm].total():,}"
        table.append((arm, f"{sent[arm]:,}", count, number, reasons or "–"))
    yield Plot(
        key="client",
        title="The client: lag and failures",
        findings=(_health(rows, failed, sum(sent.values())),),
        charts=tuple(charts),
        table=table,
        note=(
            "Lag is how late a request was sent; shown are the median and range over the runs of "
            "each run's p99. A request has failed unless it ended with status 200, no error, "
            "[DONE] and exactly the requested number of tokens."
        ),
    )


def order_plots(subject: Subject) -> Iterator[Plot]:
    """What ran when, and whether the machine became slower or faster meanwhile."""
    runs = [run for run in subject.result.runs if run.outcomes]
    if not runs:
        return
    spans = [
        Span(
            run.arm,
            subject.looks[run.arm],
            run.began / _MINUTE,
            run.ended / _MINUTE,
            f"{run.point.label}, {run.profile.label}, block {run.block}",
        )
        for run in sorted(runs, key=lambda run: list(subject.arms).index(run.arm))
    ]
    charts = [timeline("what ran when", spans, "minutes from the start")]
    drift = _drift(subject)
    if drift:
        head = "runs of each block against the same arm and cell"
        charts.append(dots(head, {"": drift}, "slower than the median", percent_tick, centred=True))
    table = [("minute", "arm", "what", "block", "seconds")]
    runs = sorted(runs, key=lambda run: run.began)
    first = runs[0].began
    for run in runs:
        minute, seconds = (run.began - first) / _MINUTE, run.ended - run.began
        what = f"{run.point.label}, {run.profile.label}"
        table.append((f"{minute:.1f}", run.arm, what, str(run.block), digits(seconds)))
    yield Plot(
        key="order",
        title="The order of the runs",
        findings=(_steadiness(drift),),
        charts=tuple(charts),
        table=table,
        note=(
            "Within a block the arms run in random order, so drift of the machine affects all "
            "alike. Each run is compared with the median of its arm in its cell, by time per token "
            "(or time to first token, where there is none); a block's mark is the median over its "
            "runs, its bar their range."
        ),
    )


def _runs(subject: Subject, arm: str) -> list[Run]:
    return [run for run in subject.result.runs if run.arm == arm]


def _lag(subject: Subject, arm: str) -> Estimate | None:
    """Milliseconds."""
    return spread(
        [one.lag_p99 * 1e3 for cell in subject.cells for one in cell.figures.get(arm, {}).values()]
    )


def _reasons(runs: Sequence[Run]) -> Counter[str]:
    return Counter(
        outcome.error for run in runs for outcome in run.outcomes if outcome.error is not None
    )


def _health(lags: Sequence[Row], failed: dict[str, Counter[str]], sent: int) -> str:
    worst = max(lags, key=lambda row: row.high)
    late = f"The client was at most {digits(worst.high)} ms late (p99, {worst.label})."
    reasons: Counter[str] = sum(failed.values(), Counter())
    if not reasons:
        return f"All {sent:,} requests were answered in full. {late}"
    (reason, times), *_ = reasons.most_common(1)
    count = reasons.total()
    return f"{count:,} of {sent:,} requests failed, {times:,} of them with “{reason}”. {late}"


def _drift(subject: Subject) -> list[Row]:
    """For each block, how much slower its runs were than the median of their arm and cell."""
    off: dict[int, list[float]] = {}
    for cell in subject.cells:
        for arm, by_block in cell.figures.items():
            metric = next((name for name in _DRIFT_METRICS if cell.spread(arm, name)), "")
            middle = cell.spread(arm, metric)
            if middle is None or len(by_block) < 2:
                continue
            for block, one in by_block.items():
                if (value := one.values.get(metric)) is not None:
                    off.setdefault(block, []).append((value / middle.value - 1) * 100)
    return [
        Row(
            f"block {block}",
            _BLOCK,
            own.value,
            own.low,
            own.high,
            percent_tick(round(own.value, 1)),
        )
        for block, values in sorted(off.items())
        if (own := spread(values)) is not None
    ]


def _steadiness(drift: Sequence[Row]) -> str:
    if len(drift) < 2:
        return "Too few runs to see whether the machine drifted."
    slowest, fastest = max(drift, key=lambda row: row.value), min(drift, key=lambda row: row.value)
    apart = percent((slowest.value - fastest.value) / 100)
    furthest = max(abs(end) for row in drift for end in (row.low, row.high)) / 100
    if apart == percent(0.0):
        return f"No block was slower than another; runs were at most {percent(furthest)} % off."
    return (
        f"Runs of {slowest.label} were {apart} % slower than those of {fastest.label} (medians); "
        f"single runs were at most {percent(furthest)} % off the median of their arm and cell."
    )
