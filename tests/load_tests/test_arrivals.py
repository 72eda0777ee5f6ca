import asyncio
import time
from itertools import pairwise

import pytest

from load_tests.arrivals import closed_loop, poisson, poisson_offsets


def test_closed_loop_keeps_exactly_its_workers_busy():
    in_flight, seen = 0, []

    async def send(request: int, intended: float) -> int:
        nonlocal in_flight
        in_flight += 1
        seen.append(in_flight)
        await asyncio.sleep(0.001 * (request % 3))
        in_flight -= 1
        return request * 10

    answers = asyncio.run(closed_loop(range(20), 4, send))
    assert answers == [request * 10 for request in range(20)]
    assert max(seen) == 4
    assert seen[4:] == [4] * 16


def test_a_closed_loop_never_needs_more_workers_than_requests():
    async def send(request: str, intended: float) -> str:
        return request

    assert asyncio.run(closed_loop(["a"], 32, send)) == ["a"]
    assert asyncio.run(closed_loop([], 3, send)) == []


def test_closed_loop_requests_are_intended_when_they_are_sent():
    async def send(request: int, intended: float) -> float:
        return time.perf_counter() - intended

    assert max(asyncio.run(closed_loop(range(5), 1, send))) < 0.05


def test_poisson_has_the_rate_and_the_scatter_of_its_name():
    offsets = poisson_offsets(5001, 4.0, "seed")
    gaps = [b - a for a, b in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert offsets[0] == 0.0
    assert mean == pytest.approx(1 / 4, rel=0.06)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)  # exponential: deviation = mean


def test_poisson_offsets_follow_from_the_seed():
    assert poisson_offsets(9, 1.0, "a") == poisson_offsets(9, 1.0, "a")
    assert poisson_offsets(9, 1.0, "a") != poisson_offsets(9, 1.0, "b")


def test_poisson_does_not_wait_for_answers_and_keeps_the_order():
    started: list[float] = []

    async def send(request: int, intended: float) -> tuple[int, float]:
        started.append(time.perf_counter())
        await asyncio.sleep(0.2)
        return request, intended

    answers = asyncio.run(poisson(range(6), 200.0, "seed", send))
    offsets = poisson_offsets(6, 200.0, "seed")
    assert [request for request, _ in answers] == list(range(6))
    assert [at - answers[0][1] for _, at in answers] == pytest.approx(offsets)
    assert started[-1] - started[0] < 0.2
