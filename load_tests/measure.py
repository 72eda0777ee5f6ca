"""Runs one scenario once against one server and turns the outcomes into the figures of a run."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from load_tests.arrivals import closed_loop, poisson
from load_tests.client import Server, complete
from load_tests.cpu import CpuMeter, CpuShares
from load_tests.prompts import PromptMaker
from load_tests.scenarios import Scenario, Sizes, requests
from load_tests.terms import Outcome, Request

_WARM_UP_PROMPT_TOKENS = 16
_WARM_UP_OUTPUT_TOKENS = 4

Tick = Callable[[int, int], None]  # answered, of how many


class NoSuccess(Exception):
    """Not one request of a run succeeded; the message holds the most frequent reason."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. Latencies are of the successful requests only; failures are counted beside them."""

    requests: int
    failed: int
    errors: dict[str, int]  # reason → how often
    total_s: float  # first intended start to last end
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # prompt tokens of one request over its TTFT, median
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float | None
    lag_p99_ms: float  # how late the client itself was
    prompt_tokens_off: int  # requests whose prompt the server counts differently
    cpu: CpuShares | None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, interpolated linearly."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


async def warm_up(server: Server, count: int, prompts: PromptMaker) -> None:
    """`count` short requests at once, so that no run pays for what is made on first use.

    Raises NoSuccess when none is answered properly, with the reason.
    """
    short = [prompts.request(_WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS) for _ in range(count)]
    outcomes = await asyncio.gather(*(complete(server, request) for request in short))
    if all(outcome.error is not None for outcome in outcomes):
        raise NoSuccess(str(outcomes[0].error))


async def run(
    server: Server,
    scenario: Scenario,
    sizes: Sizes,
    prompts: PromptMaker,
    *,
    seed: str,
    server_pid: int | None = None,
    tick: Tick | None = None,
) -> RunFigures:
    """Measure `scenario` once. Raises NoSuccess when every request failed."""
    todo = requests(scenario, sizes, prompts)
    answered = 0

    async def send(request: Request, intended: float) -> Outcome:
        nonlocal answered
        outcome = await complete(server, request, intended)
        answered += 1
        if tick is not None:
            tick(answered, len(todo))
        return outcome

    meter = CpuMeter(server_pid)
    if scenario.rate:
        outcomes = await poisson(todo, scenario.rate, seed, send)
    else:
        outcomes = await closed_loop(todo, scenario.concurrency, send)
    return figures(todo, outcomes, meter.stop())


def figures(
    sent: Sequence[Request], outcomes: Sequence[Outcome], cpu: CpuShares | None = None
) -> RunFigures:
    """The figures of one run from its requests and their outcomes. Raises NoSuccess."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    if not good:
        raise NoSuccess(errors.most_common(1)[0][0])
    total_s = max(o.ended for o in outcomes) - min(o.intended for o in outcomes)
    ttfts = [_ttft_s(outcome) for outcome in good]
    tpots = [tpot for outcome in good if (tpot := _tpot_s(outcome)) is not None]
    tokens = sum(outcome.output_tokens for outcome in good)
    return RunFigures(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        errors=dict(errors),
        total_s=total_s,
        output_tokens=tokens,
        output_tokens_per_s=tokens / total_s,
        prompt_tokens_per_s=percentile([o.prompt_tokens / _ttft_s(o) for o in good], 0.5),
        ttft_p50_ms=percentile(ttfts, 0.5) * 1e3,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1e3,
        tpot_p50_ms=percentile(tpots, 0.5) * 1e3 if tpots else None,
        lag_p99_ms=percentile([o.sent - o.intended for o in outcomes], 0.99) * 1e3,
        prompt_tokens_off=sum(
            outcome.error is None and outcome.prompt_tokens != request.prompt_tokens
            for request, outcome in zip(sent, outcomes, strict=True)
        ),
        cpu=cpu,
    )


def _ttft_s(outcome: Outcome) -> float:
    """Intended start to the first chunk with text."""
    return outcome.chunks[0][0] - outcome.intended


def _tpot_s(outcome: Outcome) -> float | None:
    """Seconds per token after the first; None for a single token."""
    if outcome.output_tokens < 2:
        return None
    return (outcome.ended - outcome.chunks[0][0]) / (outcome.output_tokens - 1)
