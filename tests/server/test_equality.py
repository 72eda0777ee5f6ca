"""The whole engine against one uncached pass: chunked, ragged, shared, preempted, at every step.

A real tiny decoder in float64 runs under the real scheduler and cache, with a pool too small for
all requests. Every row of logits it computes is compared with the row that one pass over the
finished sequence gives.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cache.manager import CacheManager
from model.attention.reference import ReferenceAttention
from model.attention.sdpa import SdpaAttention
from model.sampling import SamplingParams
from server.engine import Engine
from server.request import Request
from server.scheduler import Limits, Scheduler
from tests.model.running import CPU, new_cache, run_uncached
from tests.model.tiny import CONTEXT, ENCODINGS, tiny

BLOCK = 4
LIMITS = Limits(max_seqs=8, max_step_tokens=16, max_context=CONTEXT, max_waiting=100)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So small a model only waits for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recorder:
    """A forward that keeps the logits of every row it computes, chunk by chunk."""

    def __init__(self, decoder):
        self.decoder = decoder
        self.chunks = []

    def __call__(self, batch, kv):
        # Every row is wanted here, not only those that are sampled.
        everything = replace(batch, output_rows=torch.arange(len(batch.tokens)))
        logits = self.decoder(everything, kv)
        starts = batch.query_starts.tolist()
        for start, end in pairwise(starts):
            self.chunks.append((batch.positions[start:end], logits[start:end]))
        return logits[batch.output_rows]


def request(name, prompt, *, max_tokens, seed=None):
    temperature = 0.0 if seed is None else 1.0
    return Request(
        id=name,
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        arrival=0.0,
        rng=random.Random(seed),
    )


def engine(forward, decoder, blocks):
    kv = new_cache(decoder, blocks, BLOCK)
    kv._keys.fill_(torch.nan)
    kv._values.fill_(torch.nan)
    manager = CacheManager(blocks, BLOCK)
    scheduler = Scheduler(manager, LIMITS)
    return Engine(forward, kv, manager, scheduler, device=CPU), manager, scheduler


def family(rng):
    """Prompts of which many begin alike, on and off block bounds."""
    stem = [rng.randrange(61) for _ in range(23)]
    own = [[rng.randrange(61) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    return [stem[: rng.choice([0, 8, 12, 23])] + tail for tail in own] + [stem, stem]


CASES = [*((encoding, ReferenceAttention) for encoding in ENCODINGS), ("rope", SdpaAttention)]


@pytest.mark.parametrize(("encoding", "backend"), CASES)
def test_every_step_equals_one_uncached_pass(encoding, backend):
    rng = random.Random(encoding)
    decoder = tiny(encoding, backend)
    recorder = Recorder(decoder)
    running, manager, scheduler = engine(recorder, decoder, blocks=34)
    requests = [
        request(f"r{i}", prompt, max_tokens=rng.randint(1, 40), seed=i if i % 3 == 0 else None)
        for i, prompt in enumerate(family(rng))
    ]
    waiting = rng.sample(requests, len(requests))
    owners = []  # per recorded chunk: the request it was computed for
    plan = scheduler.plan

    def planning():
        made = plan()
        owners.extend(work.request for work in made.work)
        nonlocal chunks
        chunks += sum(not work.samples for work in made.work)
        return made

    scheduler.plan = planning
    preempted = hits = chunks = 0
    while waiting or running.busy:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2]))):
            running.submit(waiting.pop(0))
        stats = running.step().stats
        preempted += stats.preemptions
        hits += stats.prefix_hit_tokens
        manager.check()
        scheduler.check()
    assert preempted > 0
    assert hits > 0
    assert chunks > 5  # that ended before their request's last known token
    reference = tiny(encoding)
    oracle = {each.id: run_uncached(reference, each.tokens) for each in requests}
    worst = 0.0
    for owner, (positions, logits) in zip(owners, recorder.chunks, strict=True):
        worst = max(worst, float((logits - oracle[owner.id][positions]).abs().max()))
    assert worst <= 1e-10
    assert manager.counts().active == 0


@pytest.mark.parametrize("seed", [None, 5])
def test_company_and_preemption_change_no_token(seed):
    """The same request alone, and in a crowd that preempts it."""
    rng = random.Random(1)
    decoder = tiny("rope")
    prompts = family(rng)

    def run(names, blocks):
        running, _, _ = engine(decoder, decoder, blocks)
        requests = [
            request(f"r{i}", prompts[i], max_tokens=30, seed=None if seed is None else seed + i)
            for i in names
        ]
        for each in requests:
            running.submit(each)
        while running.busy:
            running.step()
        return requests

    crowd = run(range(len(prompts)), blocks=30)
    disturbed = [i for i, each in enumerate(crowd) if each.preemptions]
    assert disturbed
    for i in {*disturbed[:4], 0, len(crowd) - 1}:
        together, (alone,) = crowd[i], run([i], blocks=30)
        assert alone.preemptions == 0
        assert together.tokens == alone.tokens
