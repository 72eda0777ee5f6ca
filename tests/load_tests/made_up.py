"""Made-up results: arms whose times follow a formula, so that the truth is known."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ropewalk.load_tests.common.types import Outcome, Point, Profile, Result, Run, ServerView

SYNC = Profile("sync")
TOKENS = 8  # of an answer
PER_TOKEN = 0.010  # seconds of the zero at a context of 0
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
    blocks: int = 4,
    noise: float = 0.002,
    arms: Mapping[str, Mapping[str, object]] | None = None,
    zero: str | None = "nope",
) -> Result:
    """Every step of an arm takes its factor times the zero's time, plus noise."""
    dice = random.Random(5)
    runs: list[Run] = []
    now = 100.0
    for block in range(blocks):
        for point in points:
            for profile in profiles:
                for arm in dice.sample(sorted(factors), len(factors)):
                    step = PER_TOKEN * factors[arm] * _slower(point, profile)
                    step *= 1 + dice.gauss(0, noise)
                    runs.append(run(arm, point, profile, block, now, step))
                    now = runs[-1].steady_to + 0.5
    return Result(
        command="ropewalk bench --workload longctx",
        arguments={"seed": 0},
        environment={"processor": "two cores", "commit": "1234abc"},
        arms=arms or {arm: ENCODINGS.get(arm, {"encoding": arm}) for arm in factors},
        zero=zero if zero in factors and len(factors) > 1 else None,
        runs=tuple(runs),
        warnings=(),
    )


def run(arm: str, point: Point, profile: Profile, block: int, now: float, step: float) -> Run:
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
    return Run(arm, point, profile, block, tuple(outcomes), start, now)


def failed(whole: Result, arm: str, error: str) -> Result:
    """The same, but every request of one arm failed."""
    runs = [
        replace(one, outcomes=tuple(replace(o, chunks=(), error=error) for o in one.outcomes))
        if one.arm == arm
        else one
        for one in whole.runs
    ]
    return replace(whole, runs=tuple(runs))


def counted(
    whole: Result, counters: Mapping[str, Mapping[str, float]], *disagreements: str
) -> Result:
    """The same, with what each arm's server counted in every run."""
    runs = [
        replace(one, server=ServerView(counters[one.arm], {}, disagreements)) for one in whole.runs
    ]
    return replace(whole, runs=tuple(runs))


def _slower(point: Point, profile: Profile) -> float:
    load = profile.rate if profile.open_loop else profile.concurrency
    return 1 + (point.context or 0) / 8192 + 0.1 * load
