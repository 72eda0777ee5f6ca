"""What a server's /metrics say about a run, checked against what the client saw.

A scrape keeps the text, which is parsed after the run, because parsing takes time from the load.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from ropewalk.load_tests.client.client import Server, Unreachable, fetch
from ropewalk.load_tests.common.types import Outcome, ServerView

_FAULTS = ("ropewalk_kv_mutated_entries_total", "ropewalk_kv_stale_entries_total")
_COUNTERS = ("counter", "histogram", "summary")  # of the last two, sums and counts
_LEFT_OUT = ("model_name", "encoding", "engine")  # the same in every series of a variant
_TTFT = ("ropewalk_time_to_first_token_seconds", "vllm:time_to_first_token_seconds")
_LOOKS = 3
_LOOK_EVERY_S = 0.1
_TTFT_SLACK_S = 0.1  # for connecting, and for first tokens without text


async def snapshot(server: Server) -> str:
    """One answer of /metrics, for all the models of the server. Raises Unreachable."""
    body = await fetch(server, "GET", "/metrics")
    if b"# TYPE " not in body:
        raise Unreachable(f"{server.url}/metrics are no Prometheus metrics")
    return body.decode(errors="replace")


async def settled(server: Server, before: str, outcomes: Sequence[Outcome]) -> str:
    """A snapshot after a run, repeated a few times while server and client disagree.

    The last tokens of an answer are sent before they are counted. Raises Unreachable.
    """
    after = await snapshot(server)
    for _ in range(_LOOKS):
        if not view(before, (), after, server.model or "", outcomes).disagreements:
            break
        await asyncio.sleep(_LOOK_EVERY_S)
        after = await snapshot(server)
    return after


def view(
    before: str,
    during: Sequence[str],
    after: str,
    model_name: str,
    outcomes: Sequence[Outcome],
) -> ServerView:
    """The run of one variant, whose series have `model_name`, or no such label on another server.

    Leaves out counters that did not increase, and the buckets of histograms.
    Raises ValueError for a text that is no Prometheus exposition.
    """
    old, new = (_samples(text, model_name, _COUNTERS) for text in (before, after))
    grown = {name: value - old.get(name, 0.0) for name, value in new.items()}
    gauges: dict[str, float] = {}
    for seen in (*during, after):
        for name, value in _samples(seen, model_name, ("gauge",)).items():
            gauges[name] = max(value, gauges.get(name, value))
    if any(value < 0 for value in grown.values()):
        found = ["The server's counters went down: it was restarted during the run."]
    else:
        found = list(_disagreements(grown, outcomes))
    counters = {name: value for name, value in grown.items() if value > 0}
    return ServerView(counters, gauges, tuple(found))


def total(counters: Mapping[str, float], *families: str) -> float | None:
    """The sum, over all labels, of the first of `families` that exists; None without any."""
    for family in families:
        values = [value for name, value in counters.items() if name.partition("{")[0] == family]
        if values:
            return sum(values)
    return None


def _disagreements(grown: Mapping[str, float], outcomes: Sequence[Outcome]) -> Iterable[str]:
    """`grown` has every counter; those that did not increase are 0."""
    answered = [outcome for outcome in outcomes if outcome.error is None and not outcome.left]
    # The server may have counted any part of a request that failed or that the client left.
    exact = len(answered) == len(outcomes)
    for what, families, mine in (
        (
            "output tokens",
            ("ropewalk_generated_tokens_total", "vllm:generation_tokens_total"),
            sum(outcome.output_tokens for outcome in answered),
        ),
        (
            "prompt tokens",
            ("ropewalk_prompt_tokens_total", "vllm:prompt_tokens_total"),
            sum(outcome.prompt_tokens for outcome in answered),
        ),
        (
            "requests that ended",
            ("ropewalk_requests_total", "vllm:request_success_total"),
            len(answered),
        ),
        (
            "prompt tokens found in the prefix cache",
            ("ropewalk_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"),
            _cached(answered),
        ),
    ):
        its = total(grown, *families)
        if its is None or mine is None or its == mine or (its > mine and not exact):
            continue
        yield f"The server counted {its:g} {what}, the client {mine:g}."
    yield from _unseen_ends(grown, exact)
    yield from _first_token(grown, answered if exact else [])
    for family in _FAULTS:
        if faults := total(grown, family):
            yield f"{family} rose by {faults:g} and must stay 0: the cache is not sound."


def _cached(answered: Sequence[Outcome]) -> int | None:
    """None if the server does not report it to its clients."""
    cached = [o.cached_tokens for o in answered if o.cached_tokens is not None]
    return sum(cached) if len(cached) == len(answered) else None


def _unseen_ends(grown: Mapping[str, float], exact: bool) -> Iterable[str]:
    for reason in ("abort", "error"):
        ended = grown.get(f'ropewalk_requests_total{{finish_reason="{reason}"}}', 0.0)
        if exact and ended:
            yield (
                f"The server ended {ended:g} requests with {reason!r}; the client saw all succeed."
            )


def _first_token(grown: Mapping[str, float], answered: Sequence[Outcome]) -> Iterable[str]:
    """The server's mean must be the shorter one, but not by much."""
    count = total(grown, *(f"{family}_count" for family in _TTFT))
    seconds = total(grown, *(f"{family}_sum" for family in _TTFT))
    waits = [outcome.chunks[0][0] - outcome.sent for outcome in answered if outcome.chunks]
    if not count or seconds is None or len(waits) != len(answered) or not waits:
        return
    its, mine = seconds / count, sum(waits) / len(waits)
    if its > mine * 1.05 + 0.001 or mine > 1.5 * its + _TTFT_SLACK_S:
        yield (
            f"The server's mean time to first token is {its * 1e3:.1f} ms, "
            f"the client's {mine * 1e3:.1f} ms."
        )


def _samples(text: str, model_name: str, kinds: Sequence[str]) -> dict[str, float]:
    """Values by name and labels, of the series of one model and of those without a model."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(_lines_of(text, kinds)):
        for sample in family.samples:
            if sample.labels.get("model_name", model_name) != model_name:
                continue
            if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                continue
            name = sample.name + _shown(sample.labels)
            found[name] = found.get(name, 0.0) + sample.value
    return found


def _lines_of(text: str, kinds: Sequence[str]) -> str:
    """Only the families of these kinds, without help texts, to parse less."""
    kept: list[str] = []
    wanted = False
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            wanted = line.rpartition(" ")[2] in kinds
        if wanted and not line.startswith("# HELP "):
            kept.append(line)
    return "\n".join(kept) + "\n"


def _shown(labels: Mapping[str, str]) -> str:
    shown = ",".join(
        f'{name}="{value}"' for name, value in sorted(labels.items()) if name not in _LEFT_OUT
    )
    return f"{{{shown}}}" if shown else ""
