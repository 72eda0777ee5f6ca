"""A real engine, scheduler and cache over a tiny decoder; every row of logits is kept."""

import random
from dataclasses import replace

import torch

from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.spill import HostMemory
from ropewalk.cache.types import Audit
from ropewalk.model.sampler import Sampler
from ropewalk.server.engine.engine import Engine, Runner
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.scheduling.request import Limits
from ropewalk.server.scheduling.scheduler import Scheduler
from tests.model.running import full_of_nan, new_cache
from tests.model.tiny import CONTEXT
from tests.server.fake_engine import make_request

BLOCK = 4
LIMITS = Limits(max_seqs=8, max_step_tokens=16, max_context=CONTEXT, max_queue=100)


def request(name, prompt, *, max_tokens, seed=None, **more):
    """Greedy without a seed."""
    more |= {"temperature": 0.0 if seed is None else 1.0, "rng": random.Random(seed)}
    return make_request(name, prompt, max_tokens=max_tokens, **more)


def engine(
    forward,
    decoder,
    blocks,
    limits=LIMITS,
    stored=None,
    *,
    ahead=False,
    runner=Runner,
    audit=Audit.FULL,
    sharing=True,
    spill=0,
):
    """An engine on a cache full of NaN; `ahead`: steps are launched ahead, as on a GPU."""
    kv = full_of_nan(new_cache(decoder, blocks, BLOCK, stored))
    ledger = Ledger(kv, audit)
    place = HostMemory(kv, spill, ledger) if spill else None
    manager = CacheManager(blocks, BLOCK, prefix_sharing=sharing, place=place)
    rules = [decoder.encoding.for_layer(layer) for layer in range(decoder.config.num_layers)]
    scheduler = Scheduler(manager, limits, Operations(manager, kv, rules, ledger))
    auditor = Auditor("recorded", ledger, manager, scheduler)
    run = runner(forward, kv, manager, Sampler())
    launch = run.launch if ahead else None
    made = Engine(run, kv, manager, scheduler, auditor, PositionMeter(), launch=launch)
    return made, manager, scheduler


class Recording:
    """An engine that keeps what it computed: rows of (request, first row, logits)."""

    def __init__(self, decoder, blocks, limits=LIMITS, stored=None, **more):
        """more: of `engine`."""
        self.decoder = decoder
        recording = self

        class Building(Runner):
            def build(self, work):
                recording.work = work
                return super().build(work)

            def launch(self, work, after):
                launched = super().launch(work, after)
                recording.ahead += after is not None
                return launched

        made = engine(self._forward, decoder, blocks, limits, stored, runner=Building, **more)
        self.engine, self.manager, self.scheduler = made
        self.rows = []
        self.preempted = self.hits = self.chunks = 0
        self.ahead = 0  # steps that were begun before the one before them was read

    def step(self):
        stats = self.engine.step().stats
        self.preempted += stats.preemptions
        self.hits += stats.cached_prompt_tokens
        self.manager.check()
        self.scheduler.check()

    def finish(self, *requests):
        """Submit them, and step until nothing is left to do."""
        for each in requests:
            self.engine.submit(each)
        while self.engine.busy:
            self.step()

    def parts(self, owner):
        """(first row, logits) of everything computed for a request."""
        return [(first, logits) for of, first, logits in self.rows if of is owner]

    def _forward(self, batch, kv):
        # Every row is wanted here, not only those that are sampled.
        everything = replace(batch, output_rows=torch.arange(len(batch.tokens)))
        logits = self.decoder(everything, kv)
        rows_of = logits.split([each.count for each in self.work])
        for each, rows in zip(self.work, rows_of, strict=True):
            self.rows.append((each.request, each.start, rows))
            self.chunks += not each.samples  # it ends before the request's last known token
        return logits[batch.output_rows]
