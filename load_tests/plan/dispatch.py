"""Sends a trace to replicas that run, each request to the one that a policy chooses.

This is the load test's own client choosing a server, to check predictions. It is no router.
"""

import time
from collections.abc import Sequence

import numpy as np

from ropewalk.load_tests.client.client import Server, Unreachable, complete
from ropewalk.load_tests.common.types import Outcome, Profile, Request
from ropewalk.load_tests.plan.routing import Policy
from ropewalk.load_tests.plan.simulate import Answered
from ropewalk.load_tests.plan.traffic import Call, requests_of
from ropewalk.load_tests.run.serving import flush
from ropewalk.load_tests.workload.arrivals import drive


async def dispatch(
    servers: Sequence[Server],
    policy: Policy,
    trace: Sequence[Call],
    profile: Profile,
    seed: str,
    vocab_size: int,
) -> list[Answered]:
    """What became of the calls, in their order; the caches are emptied first.

    Raises Unreachable, also when a request fails.
    """
    for server in servers:
        await flush(server)
    requests = requests_of(trace, seed, vocab_size)
    calls = {id(request): call for request, call in zip(requests, trace, strict=True)}
    chosen: dict[int, int] = {}
    loads = np.zeros(len(servers), np.int64)

    async def send(request: Request, intended: float) -> Outcome:
        replica = chosen[id(request)] = policy(calls[id(request)], loads)
        loads[replica] += 1
        try:
            return await complete(servers[replica], request, intended)
        finally:
            loads[replica] -= 1

    began = time.perf_counter()
    driven = await drive(requests, profile, seed, send)
    for outcome in driven.outcomes:
        if outcome.error is not None:
            raise Unreachable(f"a request failed: {outcome.error}")
    return [
        Answered(
            calls[id(request)],
            chosen[id(request)],
            outcome.intended - began,
            outcome.chunks[0][0] - began,
            outcome.ended - began,
            outcome.cached_tokens or 0,
        )
        for request, outcome in zip(requests, driven.outcomes, strict=True)
    ]
