"""When the requests of a plan are sent: by a closed loop of workers, or at random. No HTTP here.

`send` gets a request and the time when it should be sent (`time.perf_counter` seconds), so that a
late client lengthens the measured latency instead of shortening it.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ropewalk.load_tests.common.types import Outcome, Profile, Request

Send = Callable[[Request, float], Coroutine[Any, Any, Outcome]]


@dataclass(frozen=True, slots=True)
class Driven:
    """Outcomes in the order of the requests, and the steady window as in `types.Run`."""

    outcomes: tuple[Outcome, ...]
    steady_from: float
    steady_to: float


async def drive(plan: Sequence[Request], profile: Profile, seed: str, send: Send) -> Driven:
    """Send all requests of `plan` according to `profile` and wait for their outcomes."""
    if profile.open_loop:
        *offsets, end = arrival_offsets(len(plan) + 1, profile, seed)
        return await _open_loop(plan, offsets, end, send)
    return await _closed_loop(plan, profile.concurrency, send)


def arrival_offsets(count: int, profile: Profile, seed: str) -> list[float]:
    """Seconds after the start at which each request leaves, the first after a gap as well.

    The gaps are gamma distributed with mean 1/rate and shape `burstiness`; shape 1 is Poisson.
    """
    source = random.Random(seed)
    shape, scale = profile.burstiness, 1 / (profile.rate * profile.burstiness)
    return list(accumulate(source.gammavariate(shape, scale) for _ in range(count)))


async def _closed_loop(requests: Sequence[Request], workers: int, send: Send) -> Driven:
    """A worker sends its next request once its last is answered, so `workers` are in flight.

    The workers' first requests are sent together and queue behind each other. They are the warm-up:
    the steady window opens when the first worker sends its second request, with all others still
    busy, and closes when a worker finds none left. A single worker needs no warm-up.
    """
    queue = iter(enumerate(requests))
    outcomes: dict[int, Outcome] = {}
    start = time.perf_counter()
    second: list[float] = []
    idle: list[float] = []

    async def worker() -> None:
        for index, request in queue:
            intended = time.perf_counter()
            if index >= workers:
                second.append(intended)
            outcomes[index] = await send(request, intended)
        idle.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(workers, len(requests))):
            group.create_task(worker())
    return Driven(
        tuple(outcomes[index] for index in range(len(requests))),
        second[0] if second and workers > 1 else start,
        idle[0] if idle else start,
    )


async def _open_loop(
    requests: Sequence[Request], offsets: Sequence[float], end: float, send: Send
) -> Driven:
    """Requests are sent at their times, however many are unanswered.

    The server begins empty, so the steady window opens with the end of the first answer (a failure
    is none), or at the start if no request comes after that. It closes at `end`, when one request
    more would have come: with the last one as its end, it would have as many arrivals as are due
    in a longer time.
    """
    start = time.perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for request, offset in zip(requests, offsets, strict=True):
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            tasks.append(group.create_task(send(request, start + offset)))
    outcomes = tuple(task.result() for task in tasks)
    if not outcomes:
        return Driven((), start, start)
    served = (outcome.ended for outcome in outcomes if outcome.error is None)
    first = min(served, default=math.inf)
    opened = first if first <= outcomes[-1].intended else start
    return Driven(outcomes, opened, start + end)
