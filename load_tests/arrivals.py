"""When requests leave: a closed loop of workers, or Poisson arrivals at a rate. No HTTP here.

`send` gets a request and the moment it should leave (`time.perf_counter` seconds), so that a
client running late counts against the latency and not for it.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

Sent = TypeVar("Sent")
Received = TypeVar("Received")
Send = Callable[[Sent, float], Coroutine[Any, Any, Received]]


async def closed_loop(
    requests: Sequence[Sent], workers: int, send: Send[Sent, Received]
) -> list[Received]:
    """`workers` requests in flight until all are answered; answers in the order of `requests`."""
    queue = enumerate(requests)
    answers: dict[int, Received] = {}

    async def worker() -> None:
        for index, request in queue:
            answers[index] = await send(request, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(workers, len(requests))):
            group.create_task(worker())
    return [answers[index] for index in range(len(requests))]


async def poisson(
    requests: Sequence[Sent], rate: float, seed: str, send: Send[Sent, Received]
) -> list[Received]:
    """Requests leave at `rate` per second on average, however many are unanswered."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[Received]] = []

    async with asyncio.TaskGroup() as group:
        for request, offset in zip(
            requests, poisson_offsets(len(requests), rate, seed), strict=True
        ):
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            tasks.append(group.create_task(send(request, start + offset)))
    return [task.result() for task in tasks]


def poisson_offsets(count: int, rate: float, seed: str) -> list[float]:
    """Seconds after the start at which each request leaves; the first leaves at once."""
    source = random.Random(seed)
    offsets = [0.0]
    while len(offsets) < count:
        offsets.append(offsets[-1] + source.expovariate(rate))
    return offsets[:count]
