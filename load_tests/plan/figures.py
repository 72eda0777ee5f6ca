"""The figures of a prediction or a measurement, and what they look like."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.load_tests.common.statistics import percentile
from ropewalk.load_tests.plan.service import Service
from ropewalk.load_tests.plan.simulate import Answered
from ropewalk.load_tests.report.charts import Mark, Series, lines, plain, side_by_side
from ropewalk.report.figure import Picture, looks
from ropewalk.report.statistics import Estimate
from ropewalk.report.table import markdown

_WARM_UP = 0.25  # of the requests, which find caches empty and queues short


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests after the warm-up."""

    requests_per_s: float  # answered, of all replicas together, while requests were sent
    hit_rate: float  # share of prompt tokens that were in a cache
    ttft_p50: float  # seconds to the first token
    ttft_p99: float


def figures(answered: Sequence[Answered]) -> Figures:
    """`answered` is in the order of sending."""
    steady = answered[int(len(answered) * _WARM_UP) :]
    begins, ends = steady[0].sent, max(each.sent for each in steady)
    waits = [each.first - each.sent for each in steady]
    in_time = sum(begins < each.ended <= ends for each in answered)
    return Figures(
        requests_per_s=in_time / (ends - begins) if ends > begins else 0.0,
        hit_rate=(
            sum(each.cached_tokens for each in steady)
            / sum(each.call.prompt_tokens for each in steady)
        ),
        ttft_p50=percentile(waits, 50),
        ttft_p99=percentile(waits, 99),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with so many replicas: fully busy, and at a given rate."""

    replicas: int
    policy: str
    busy: Figures  # throughput and hits are of interest
    rated: Figures  # latencies are

    @property
    def most(self) -> float:
        """Requests per second of a replica."""
        return self.busy.requests_per_s / self.replicas


def table(rows: Sequence[Row], rate: float) -> str:
    """As Markdown. `rate` is requests per second of each replica."""
    lines = [
        "|replicas|policy|requests/s of a replica, at most|hit rate"
        f"|first token at {rate:.3g}/s: median|p99|",
        "|--:|:--|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"|{row.replicas:,}|{row.policy}|{row.most:.1f}|{row.rated.hit_rate:.1%}"
            f"|{_ms(row.rated.ttft_p50)}|{_ms(row.rated.ttft_p99)}|"
        )
    return "\n".join(lines)


def comparison(predicted: Sequence[Row], measured: Sequence[Row]) -> str:
    """Each figure as predicted, as measured, and by how much the prediction is off."""
    rows = [["policy", "requests/s", "hit rate", "first token: median", "p99"]]
    for said, found in zip(predicted, measured, strict=True):
        pairs = (
            (said.busy.requests_per_s, found.busy.requests_per_s, "{:.1f}"),
            (100 * said.rated.hit_rate, 100 * found.rated.hit_rate, "{:.1f} %"),
            (1e3 * said.rated.ttft_p50, 1e3 * found.rated.ttft_p50, "{:.0f} ms"),
            (1e3 * said.rated.ttft_p99, 1e3 * found.rated.ttft_p99, "{:.0f} ms"),
        )
        cells = [
            f"{form.format(one)} → {form.format(other)} ({off(one, other)})"
            for one, other, form in pairs
        ]
        rows.append([said.policy, *cells])
    return markdown(rows, left=len(rows[0]))


def off(predicted: float, measured: float) -> str:
    """+12 %: the prediction is that much above the measurement."""
    if not measured:
        return "–"
    return f"{round(100 * (predicted / measured - 1)):+d} %".replace("-", "−")


def summary(service: Service) -> str:
    """One sentence: what a replica can do."""
    prompt_ms = service.prompt_s(100, 0) * 1e3
    (first, shortest), *rest = service.steps
    steps = "".join(f", {seconds * 1e3:.2g} with {batch}" for batch, seconds in rest)
    return (
        f"A replica computes 100 tokens of a prompt in {prompt_ms:.3g} ms; a step takes "
        f"{shortest * 1e3:.2g} ms with {first} request{steps}; its cache has "
        f"{service.blocks * service.block_size:,} tokens."
    )


def picture(rows: Sequence[Row], rate: float) -> Picture:
    """Hits, most requests and waits over the number of replicas, a line for each policy."""
    look = looks(list(dict.fromkeys(row.policy for row in rows)), None)

    def drawn(title: str, value: Callable[[Row], float]) -> Picture:
        marks: dict[str, list[Mark]] = {}
        for row in rows:
            found = value(row)
            told = f"{row.replicas:,} replicas: {found:.3g}"
            marks.setdefault(row.policy, []).append(
                Mark(Estimate(found, found, found), told, x=row.replicas)
            )
        series = [Series(name, look[name], own) for name, own in marks.items()]
        return lines(title, series, "replicas", plain)

    return side_by_side(
        [
            drawn("% of prompt tokens found in a cache", lambda row: 100 * row.rated.hit_rate),
            drawn("requests/s of a replica, at most", lambda row: row.most),
            drawn(
                f"ms to the first token, p99, at {rate:.3g} requests/s",
                lambda row: 1e3 * row.rated.ttft_p99,
            ),
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"
