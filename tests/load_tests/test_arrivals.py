import asyncio
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from ropewalk.load_tests.common.types import Outcome, Profile, Request
from ropewalk.load_tests.workload.arrivals import Driven, arrival_offsets, drive

POISSON = Profile("poisson", rate=200.0)


def plan(count: int) -> list[Request]:
    return [Request((index,), 1, 1) for index in range(count)]


def number(request: Request) -> int:
    return request.prompt[0]


def driven(count: int, profile: Profile, send) -> Driven:
    return asyncio.run(drive(plan(count), profile, "seed", send))


async def at_once(request: Request, intended: float) -> Outcome:
    now = time.perf_counter()
    return Outcome(intended, now, now, prompt_tokens=number(request))


def test_closed_loop_keeps_exactly_its_workers_busy():
    in_flight, seen = 0, []

    async def send(request: Request, intended: float) -> Outcome:
        nonlocal in_flight
        in_flight += 1
        seen.append(in_flight)
        await asyncio.sleep(0.001 * (number(request) % 3))
        in_flight -= 1
        return await at_once(request, intended)

    result = driven(20, Profile("closed", concurrency=4), send)
    assert [outcome.prompt_tokens for outcome in result.outcomes] == list(range(20))
    assert max(seen) == 4
    assert seen[4:] == [4] * 16


def test_requests_leave_in_the_order_of_the_plan():
    sent = []

    async def send(request: Request, intended: float) -> Outcome:
        sent.append(number(request))
        await asyncio.sleep(0.001 * (number(request) % 3))
        return await at_once(request, intended)

    for profile in (Profile("sync"), Profile("closed", concurrency=4), POISSON):
        sent.clear()
        driven(12, profile, send)
        assert sent == list(range(12))


def test_a_closed_loop_never_needs_more_workers_than_requests():
    assert len(driven(1, Profile("closed", concurrency=32), at_once).outcomes) == 1


@pytest.mark.parametrize("profile", [Profile("sync"), POISSON])
def test_an_empty_plan_is_over_at_once(profile):
    result = driven(0, profile, at_once)
    assert result.outcomes == ()
    assert result.steady_from == result.steady_to


def test_the_steady_window_of_a_closed_loop_leaves_out_its_ends():
    async def send(request: Request, intended: float) -> Outcome:
        await asyncio.sleep(0.01 * (1 + number(request) % 3))
        return await at_once(request, intended)

    result = driven(12, Profile("closed", concurrency=3), send)
    first_wave, later = result.outcomes[:3], result.outcomes[3:]
    assert all(outcome.intended < result.steady_from for outcome in first_wave)
    assert all(result.steady_from <= o.intended <= result.steady_to for o in later)
    assert result.steady_from >= min(outcome.ended for outcome in first_wave)
    # From then until the end of the window all three are in flight.
    assert result.steady_to < max(outcome.ended for outcome in later)
    assert sum(outcome.ended > result.steady_to for outcome in later) == 2


@pytest.mark.parametrize(
    ("count", "profile"), [(4, Profile("sync")), (3, Profile("closed", concurrency=3))]
)
def test_without_a_crowd_or_a_second_wave_every_request_counts(count, profile):
    result = driven(count, profile, at_once)
    assert all(result.steady_from <= o.intended <= result.steady_to for o in result.outcomes)


def test_poisson_has_the_rate_and_the_scatter_of_its_name():
    offsets = arrival_offsets(5001, Profile("poisson", rate=4.0), "seed")
    mean, deviation = moments(offsets)
    firsts = [arrival_offsets(1, Profile("poisson", rate=4.0), str(i))[0] for i in range(2000)]
    assert sum(firsts) / len(firsts) == pytest.approx(1 / 4, rel=0.06)  # a gap like the others
    assert mean == pytest.approx(1 / 4, rel=0.06)
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential: deviation = mean


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_has_the_rate_and_the_scatter_of_its_burstiness(burstiness):
    profile = Profile("gamma", rate=4.0, burstiness=burstiness)
    mean, deviation = moments(arrival_offsets(20_001, profile, "seed"))
    assert mean == pytest.approx(1 / 4, rel=0.06)
    assert deviation == pytest.approx(mean / burstiness**0.5, rel=0.1)


def moments(offsets: list[float]) -> tuple[float, float]:
    gaps = [b - a for a, b in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    return mean, (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5


def test_arrivals_follow_from_the_seed():
    assert arrival_offsets(9, POISSON, "a") == arrival_offsets(9, POISSON, "a")
    assert arrival_offsets(9, POISSON, "a") != arrival_offsets(9, POISSON, "b")


def test_an_open_loop_does_not_wait_for_answers_and_keeps_to_its_intended_moments():
    started: list[float] = []

    async def send(request: Request, intended: float) -> Outcome:
        started.append(time.perf_counter())
        await asyncio.sleep(0.2)
        return await at_once(request, intended)

    result = driven(6, POISSON, send)
    *offsets, end = arrival_offsets(7, POISSON, "seed")
    moments = [outcome.intended - result.steady_from for outcome in result.outcomes]
    assert moments == pytest.approx(offsets)
    assert result.steady_to - result.steady_from == pytest.approx(end)
    assert started[-1] < min(outcome.ended for outcome in result.outcomes)


def test_the_window_of_an_open_loop_opens_with_the_first_answer():
    async def send(request: Request, intended: float) -> Outcome:
        await asyncio.sleep(0.05)
        return await at_once(request, intended)

    result = driven(40, POISSON, send)
    assert result.steady_from == min(outcome.ended for outcome in result.outcomes)
    assert result.outcomes[0].intended < result.steady_from < result.outcomes[-1].intended


def test_a_failure_opens_no_window():
    async def send(request: Request, intended: float) -> Outcome:
        if number(request) in (0, 2):
            return replace(await at_once(request, intended), error="status 429")
        await asyncio.sleep(0.05)
        return await at_once(request, intended)

    result = driven(40, POISSON, send)
    served = [outcome for outcome in result.outcomes if outcome.error is None]
    assert result.steady_from == min(outcome.ended for outcome in served)

    async def fail(request: Request, intended: float) -> Outcome:
        return replace(await at_once(request, intended), error="status 500")

    result = driven(4, POISSON, fail)
    assert result.steady_from < result.outcomes[0].intended


def test_an_open_loop_offers_its_rate_on_average():
    """Whatever the window begins with, as many requests begin in it as its length is due."""
    profile = Profile("poisson", rate=1000.0)

    async def when_due(request: Request, intended: float) -> Outcome:
        """Answered a moment later, whenever this machine comes to it."""
        return replace(await at_once(request, intended), sent=intended, ended=intended + 1e-6)

    async def rate(seed: str) -> float:
        result = await drive(plan(8), profile, seed, when_due)
        start, end = result.steady_from, result.steady_to
        return sum(start <= outcome.intended <= end for outcome in result.outcomes) / (end - start)

    async def rates() -> list[float]:
        return [await rate(str(seed)) for seed in range(300)]

    found = asyncio.run(rates())
    assert sum(found) / len(found) == pytest.approx(1000, rel=0.08)
