"""Replicas, their queues, steps and caches, as events in simulated time.

A step computes up to `max_step_tokens`: one token for each request that is past its prompt, and
prompts with what is left, oldest first. Steps without a prompt are taken together, until the next
event. Each request keeps the blocks of its whole answer from the start, so nothing is preempted.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import simpy

from ropewalk.load_tests.common.types import Profile
from ropewalk.load_tests.plan.prefix_cache import PrefixCache
from ropewalk.load_tests.plan.routing import Policy
from ropewalk.load_tests.plan.service import Service
from ropewalk.load_tests.plan.traffic import Call
from ropewalk.load_tests.workload.arrivals import arrival_offsets

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a call. Times are in seconds from the start."""

    call: Call
    replica: int
    sent: float
    first: float  # its first token arrived
    ended: float
    cached_tokens: int  # of its prompt


@dataclass(slots=True)
class _Job:
    call: Call
    sent: float
    done: simpy.Event
    own: int = 0  # blocks that are not the prefix's
    computed: int = 0  # tokens of the prompt
    cached: int = 0
    left: int = 0  # tokens of the answer
    first: float = 0.0


class _Replica:
    """One server. Its process never ends; it sleeps while there is nothing to do."""

    def __init__(self, env: simpy.Environment, service: Service) -> None:
        self._env = env
        self._service = service
        self._cache = PrefixCache(service.blocks)
        self._waiting: deque[_Job] = deque()
        self._prompts: list[_Job] = []
        self._answers: list[_Job] = []
        self._wake = env.event()
        env.process(self._run())

    def send(self, job: _Job) -> None:
        size = self._service.block_size
        if -(-(job.call.prompt_tokens + job.call.output_tokens) // size) > self._service.blocks:
            raise ValueError("the cache of a replica does not hold one request")
        self._waiting.append(job)
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Process:
        while True:
            seconds, computed = self._plan()
            if computed:
                yield self._env.timeout(seconds)
                self._step(1)
                self._advance(computed)
            elif self._answers:
                yield from self._decode()
            else:
                self._wake = self._env.event()
                yield self._wake

    def _decode(self) -> Process:
        """Steps without a prompt, until the first answer is complete or somebody comes in."""
        service, env, began = self._service, self._env, self._env.now
        step = service.step_s(len(self._answers))
        steps = min(job.left for job in self._answers)
        if self._waiting or len(self._answers) >= service.max_seqs:  # nobody can come in
            yield env.timeout(steps * step)
        else:
            self._wake = env.event()
            yield env.timeout(steps * step) | self._wake
            if (passed := env.now - began) < steps * step:
                steps = min(steps, int(passed / step) + 1)
                yield env.timeout(max(0.0, began + steps * step - env.now))
        self._step(steps)

    def _plan(self) -> tuple[float, list[tuple[_Job, int]]]:
        """The time of the next step, and the tokens that it computes of each prompt.

        Who waits is admitted while there are tokens left, and knows what is computed by then.
        """
        service = self._service
        alone = len(self._prompts) + len(self._answers) + len(self._waiting) == 1
        most = service.max_step_tokens * (service.lone_factor if alone else 1)
        budget = most - len(self._answers)
        seconds, planned, ends = 0.0, [], 0
        for job in chain(tuple(self._prompts), iter(self._admit, None)):
            tokens = min(max(budget, 1), job.call.prompt_tokens - job.computed)
            seconds += service.prompt_s(tokens, job.computed)
            seconds += service.request_s * (job.computed == job.cached)
            planned.append((job, tokens))
            ends += job.computed + tokens == job.call.prompt_tokens
            budget -= tokens
            if budget <= 0:
                break
        return seconds + service.step_s(len(self._answers) + ends), planned

    def _admit(self) -> _Job | None:
        """The one that has waited longest, if there is a place and room for it."""
        service, size = self._service, self._service.block_size
        if not self._waiting or len(self._prompts) + len(self._answers) >= service.max_seqs:
            return None
        job, call = self._waiting[0], self._waiting[0].call
        reusable = min(call.prefix_tokens, call.prompt_tokens - 1) // size
        known = min(self._cache.known(call.prefix), reusable)
        own = -(-(call.prompt_tokens + call.output_tokens) // size) - known
        if not self._cache.take(call.prefix, own):
            return None
        self._waiting.popleft()
        job.own, job.left = own, call.output_tokens
        job.cached = job.computed = known * size
        self._prompts.append(job)
        return job

    def _advance(self, computed: Sequence[tuple[_Job, int]]) -> None:
        """Record a step's prompts; a finished one brings the first token of its answer."""
        size = self._service.block_size
        for job, tokens in computed:
            job.computed += tokens
            whole = min(job.computed, job.call.prefix_tokens) // size
            job.own -= self._cache.publish(job.call.prefix, whole)
            if job.computed == job.call.prompt_tokens:
                self._prompts.remove(job)
                job.first = self._env.now + self._service.way_s
                self._answers.append(job)
                job.left -= 1
        self._end()

    def _step(self, steps: int) -> None:
        for job in self._answers:
            job.left -= steps
        self._end()

    def _end(self) -> None:
        if all(job.left for job in self._answers):
            return
        for job in self._answers:
            if not job.left:
                self._cache.give_back(job.call.prefix, job.own)
                job.done.succeed()
        self._answers = [job for job in self._answers if job.left]


def simulate(
    service: Service,
    replicas: int,
    policy: Policy,
    trace: Sequence[Call],
    profile: Profile,
    seed: str,
) -> list[Answered]:
    """What becomes of the calls of `trace`, in its order, when `policy` chooses their replicas.

    They are sent as `profile` says; at random moments these are those of a load test with `seed`.
    Raises ValueError when a request is larger than a cache.
    """
    env = simpy.Environment()
    servers = [_Replica(env, service) for _ in range(replicas)]
    loads = np.zeros(replicas, np.int64)
    answered: list[Answered | None] = [None] * len(trace)

    def send(index: int) -> Process:
        call, sent = trace[index], env.now
        replica = policy(call, loads)
        loads[replica] += 1
        job = _Job(call, sent, env.event())
        servers[replica].send(job)
        yield job.done
        loads[replica] -= 1
        ended = env.now + service.way_s
        answered[index] = Answered(call, replica, sent, job.first, ended, job.cached)

    def worker(queue: Iterator[int]) -> Process:
        for index in queue:
            yield from send(index)

    def arrive() -> Process:
        for index, offset in enumerate(arrival_offsets(len(trace), profile, seed)):
            yield env.timeout(max(0.0, offset - env.now))
            env.process(send(index))

    if profile.open_loop:
        env.process(arrive())
    else:
        queue = iter(range(len(trace)))
        for _ in range(profile.concurrency):
            env.process(worker(queue))
    env.run()
    return [each for each in answered if each is not None]
