"""Plots of the load test itself: its failures, its own lag, and what ran when."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ropewalk.load_tests.common.types import Run
from ropewalk.load_tests.report.charts import Mark, Series, bars, dots, plain, timeline
from ropewalk.load_tests.report.formatting import digits, percent
from ropewalk.load_tests.report.plot import Subject, percent_tick
from ropewalk.report.figure import INK, Look
from ropewalk.report.page import Section
from ropewalk.report.statistics import Estimate, spread

_DRIFT_METRICS = ("itl_p50", "ttft_p50")  # the first of these that a cell has
_MINUTE = 60.0
_BLOCK = Look(INK, "o", "-")


def client_plots(subject: Subject) -> Iterator[Section]:
    """How late the client sent, and what failed: whether the other figures are reliable."""
    lags = {variant: _lag(subject, variant) for variant in subject.variants}
    known = {variant: lag for variant, lag in lags.items() if lag is not None}
    if not known:
        return
    charts = [dots("client lag p99, ms", {"": subject.rows(known)}, "milliseconds late", plain)]
    sent = {
        variant: sum(len(run.outcomes) for run in subject.runs(variant))
        for variant in subject.variants
    }
    left = sum(outcome.left for run in subject.result.runs for outcome in run.outcomes)
    failed = {variant: _reasons(subject.runs(variant)) for variant in subject.variants}
    if any(failed.values()):
        counts = {variant: reasons.total() for variant, reasons in failed.items()}
        shares = {
            variant: [Mark(Estimate(count, count, count), "", f"{count:,} of {sent[variant]:,}")]
            for variant, count in counts.items()
        }
        charts.append(bars("requests failed", subject.series(shares)))
    table = [("variant", "sent", "failed", "lag p99, ms", "reasons")]
    for variant in subject.variants:
        reasons = "; ".join(
            f"{count} × {reason}" for reason, count in failed[variant].most_common()
        )
        lag = lags[variant]
        number = "–" if lag is None else f"{digits(lag.value)} (at most {digits(lag.high)})"
        count = f"{failed[variant].total():,}"
        table.append((variant, f"{sent[variant]:,}", count, number, reasons or "–"))
    yield Section(
        key="client",
        title="The client: lag and failures",
        findings=(_health(known, failed, sum(sent.values()), left),),
        pictures=tuple(charts),
        table=table,
        note=(
            "Lag is how late a request was sent; shown are the median and range over the runs of "
            "each run's p99. A request has failed unless it ended with status 200, no error, "
            "[DONE] and exactly the requested number of tokens."
        ),
    )


def order_plots(subject: Subject) -> Iterator[Section]:
    """What ran when, and whether the machine became slower or faster meanwhile."""
    runs = [run for run in subject.result.runs if run.outcomes]
    if not runs:
        return
    spans: dict[str, list[Mark]] = {}
    for run in runs:
        told = f"{run.point.label}, {run.profile.label}, round {run.round + 1}"
        began, ended = run.began / _MINUTE, run.ended / _MINUTE
        spans.setdefault(run.variant, []).append(Mark(Estimate(began, began, ended), told))
    charts = [timeline("what ran when", subject.series(spans), "minutes from the start")]
    drift = _drift(subject)
    if drift:
        head = "runs of each round against the same variant and cell"
        rows = [
            Series(name, _BLOCK, [Mark(one, "", percent_tick(round(one.value, 1)))])
            for name, one in drift.items()
        ]
        below = "slower than the median"
        charts.append(dots(head, {"": rows}, below, percent_tick, centred=True))
    table = [("minute", "variant", "what", "round", "seconds")]
    runs = sorted(runs, key=lambda run: run.began)
    first = runs[0].began
    for run in runs:
        minute, seconds = (run.began - first) / _MINUTE, run.ended - run.began
        what = f"{run.point.label}, {run.profile.label}"
        table.append((f"{minute:.1f}", run.variant, what, str(run.round + 1), digits(seconds)))
    yield Section(
        key="order",
        title="The order of the runs",
        findings=(_steadiness(drift),),
        pictures=tuple(charts),
        table=table,
        note=(
            "Within a round the variants run in random order, so drift of the machine affects all "
            "alike. Each run is compared with the median of its variant in its cell, by time per "
            "token (or time to first token, where there is none); a round's mark is the median "
            "over its runs, its bar their range."
        ),
    )


def _lag(subject: Subject, variant: str) -> Estimate | None:
    """Milliseconds."""
    return spread(
        [
            one.lag_p99 * 1e3
            for cell in subject.cells
            for one in cell.figures.get(variant, {}).values()
        ]
    )


def _reasons(runs: Sequence[Run]) -> Counter[str]:
    return Counter(
        outcome.error for run in runs for outcome in run.outcomes if outcome.error is not None
    )


def _health(
    lags: Mapping[str, Estimate], failed: dict[str, Counter[str]], sent: int, left: int
) -> str:
    worst = max(lags, key=lambda variant: lags[variant].high)
    late = f"The client was at most {digits(lags[worst].high)} ms late (p99, {worst})."
    reasons: Counter[str] = sum(failed.values(), Counter())
    if not reasons and left:
        return f"{sent - left:,} requests were answered in full, {left:,} left as planned. {late}"
    if not reasons:
        return f"All {sent:,} requests were answered in full. {late}"
    (reason, times), *_ = reasons.most_common(1)
    count = reasons.total()
    return f"{count:,} of {sent:,} requests failed, {times:,} of them with “{reason}”. {late}"


def _drift(subject: Subject) -> dict[str, Estimate]:
    """For each round, how much slower its runs were than the median of their variant and cell."""
    off: dict[int, list[float]] = {}
    for cell in subject.cells:
        for variant, by_round in cell.figures.items():
            metric = next((name for name in _DRIFT_METRICS if cell.spread(variant, name)), "")
            middle = cell.spread(variant, metric)
            if middle is None or len(by_round) < 2:
                continue
            for round, one in by_round.items():
                if (value := one.values.get(metric)) is not None:
                    off.setdefault(round, []).append((value / middle.value - 1) * 100)
    found = {f"round {round + 1}": spread(values) for round, values in sorted(off.items())}
    return {name: one for name, one in found.items() if one is not None}


def _steadiness(drift: Mapping[str, Estimate]) -> str:
    if len(drift) < 2:
        return "Too few runs to see whether the machine drifted."
    fastest, *_, slowest = sorted(drift, key=lambda name: drift[name].value)
    apart = percent((drift[slowest].value - drift[fastest].value) / 100)
    furthest = max(abs(end) for one in drift.values() for end in (one.low, one.high)) / 100
    if apart == percent(0.0):
        return f"No round was slower than another; runs were at most {percent(furthest)} % off."
    return (
        f"Runs of {slowest} were {apart} % slower than those of {fastest} (medians); "
        f"single runs were at most {percent(furthest)} % off the median of their variant and cell."
    )
