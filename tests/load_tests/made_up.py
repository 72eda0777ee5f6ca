"""Made-up results: variants whose times follow a formula, so that the truth is known."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ropewalk.load_tests.common.types import Outcome, Point, Profile, Result, Run, ServerView

SYNC = Profile("sync")
TOKENS = 8  # of an answer
PER_TOKEN = 0.010  # seconds of the baseline at a context of 0
ENCODINGS = {
    "nope": {"model": "m-nope", "encoding": "nope"},
    "rope": {"model": "m-rope", "encoding": "rope"},
    "t5": {"model": "m-t5", "encoding": "t5"},
}


def longctx(*contexts: int) -> list[Point]:
    return [Point("longctx", f"longctx {context:,}", context) for context in contexts]


def result(
    factors: Mapping[str, float],
    points: Sequence[Point],
    profiles: Sequence[Profile] = (SYNC,),
    *,
    rounds: int = 4,
    noise: float = 0.002,
    variants: Mapping[str, Mapping[str, object]] | None = None,
    baseline: str | None = "nope",
) -> Result:
    """Every step of a variant takes its factor times the baseline's time, plus noise."""
    dice = random.Random(5)
    runs: list[Run] = []
    now = 100.0
    for round in range(rounds):
        for point in points:
            for profile in profiles:
                for variant in dice.sample(sorted(factors), len(factors)):
                    step = PER_TOKEN * factors[variant] * _slower(point, profile)
                    step *= 1 + dice.gauss(0, noise)
                    runs.append(run(variant, point, profile, round, now, step))
                    now = runs[-1].steady_to + 0.5
    return Result(
        command="ropewalk bench --workload longctx",
        arguments={"seed": 0},
        environment={"processor": "two cores", "commit": "1234abc"},
        variants=variants
        or {variant: ENCODINGS.get(variant, {"encoding": variant}) for variant in factors},
        baseline=baseline if baseline in factors and len(factors) > 1 else None,
        runs=tuple(runs),
        warnings=(),
    )


def run(variant: str, point: Point, profile: Profile, round: int, now: float, step: float) -> Run:
    """Four requests, one after the other, each chunk one token."""
    outcomes: list[Outcome] = []
    start = now
    for _ in range(4):
        first = now + 10 * step
        chunks = tuple((first + i * step, i + 1) for i in range(TOKENS))
        end = chunks[-1][0]
        outcomes.append(
            Outcome(now, now + 1e-4, end, chunks, point.context or 128, TOKENS, cached_tokens=0)
        )
        now = end
    return Run(variant, point, profile, round, tuple(outcomes), start, now)


def failed(whole: Result, variant: str, error: str) -> Result:
    """The same, but every request of one variant failed."""
    runs = [
        replace(one, outcomes=tuple(replace(o, chunks=(), error=error) for o in one.outcomes))
        if one.variant == variant
        else one
        for one in whole.runs
    ]
    return replace(whole, runs=tuple(runs))


def counted(
    whole: Result, counters: Mapping[str, Mapping[str, float]], *disagreements: str
) -> Result:
    """The same, with what each variant's server counted in every run."""
    runs = [
        replace(one, server=ServerView(counters[one.variant], {}, disagreements))
        for one in whole.runs
    ]
    return replace(whole, runs=tuple(runs))


def _slower(point: Point, profile: Profile) -> float:
    load = profile.rate if profile.open_loop else profile.concurrency
    return 1 + (point.context or 0) / 8192 + 0.1 * load
