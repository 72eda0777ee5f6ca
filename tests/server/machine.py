"""Random walks over the scheduler and the cache, for Hypothesis to search."""

import os
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ropewalk.cache.prefix import keyed_digest
from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import InvalidField, PromptTooLong, QueueFull
from ropewalk.server.scheduling.request import Limits, Overflow
from tests.server.provenance import STOP, World, colliding_digest

LONG = os.environ.get("STATEFUL_EXAMPLES")
SALTS = ("", "", "a", "b")
FAMILIES = [[bits >> i & 1 for i in range(24)] for bits in (0, 0x9C35A6, 0xD46A9C, 0x35A629)]


def search(usual):
    """How a walk is searched: so many examples, the same each time, or as many as asked for."""
    return settings(
        max_examples=max(300, int(LONG)) if LONG else usual,
        stateful_step_count=40,
        derandomize=LONG is None,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class ProvenanceMachine(RuleBasedStateMachine):
    """2–9 blocks of 1–4 tokens, vocabulary 2, three salts, a digest of seven values or the real."""

    world: World | None = None

    def begin(
        self, kind, blocks, size, seqs, budget, context, waiting, collide, spill, at_once, drain
    ):
        limits = Limits(seqs, budget, context, waiting, lone_factor=2)
        options = {"digest": colliding_digest if collide else keyed_digest(b"fixed")}
        self.world = kind(blocks, size, limits, spill=(spill, at_once), **options)
        self.drain_at_end = drain
        self.oddities = 0

    @initialize(
        blocks=st.sampled_from([9, 9, 8, 8, 7, 6, 5, 4, 3, 2]),
        size=st.sampled_from([2, 3, 1, 4]),
        seqs=st.sampled_from([4, 3, 2, 4, 3, 1]),
        budget=st.sampled_from([12, 12, 6, 3, 1]),
        context=st.sampled_from([24, 24, 24, 24, 12, 6, 2]),
        waiting=st.sampled_from([8, 4, 1]),
        collide=st.booleans(),
        spill=st.sampled_from([0, 0, 20, 4, 2, 1]),
        at_once=st.sampled_from([1, 2, 9]),
        drain=st.booleans(),
        crowd=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 31)), min_size=1, max_size=5),
    )
    def start(self, crowd, **shape):
        self.begin(World, **shape)
        for family, length in crowd:
            self.add(family, length, answer=9, salt="", twins=1, scored=False, steps=2)

    @rule(
        family=st.integers(0, 3),
        length=st.integers(0, 31),
        answer=st.integers(0, 9),
        salt=st.sampled_from(SALTS),
        twins=st.integers(1, 2),
        scored=st.booleans(),
        steps=st.integers(0, 3),
        overflow=st.sampled_from([Overflow.REFUSE, *Overflow]),
        forked=st.booleans(),
    )
    def add(self, family, length, answer, salt, twins, scored, steps, **more):
        """Requests that fit, from a few families with long common prefixes."""
        capacity = (self.world.cache.num_blocks - 1) * self.world.cache.block_size
        stored = min(capacity, self.world.limits.max_context - 1)
        prompt = FAMILIES[family][: 1 + length * stored // 48]
        for twin in range(twins):
            params = SamplingParams(
                max_tokens=1 + (answer + 6 * twin) % (stored - len(prompt) + 1),
                prompt_logprobs=0 if scored and family == 0 else None,
            )
            wishes = self.wishes(params, twin, **more)
            if wishes.get("overflow", Overflow.REFUSE) is not Overflow.REFUSE:
                params = replace(params, max_tokens=params.max_tokens + 20)
            self.submit(prompt, params, salt, **wishes)
        self.step(steps)

    def wishes(self, params, twin, overflow=Overflow.REFUSE, forked=False):
        """A sibling to fork from, and what to do when the context is full."""
        limits, size = self.world.limits, self.world.cache.block_size
        if params.prompt_logprobs is not None:
            return {}
        wishes = {}
        if forked and twin and f"r{len(self.world.prompts) - 1}" in self.world.live:
            wishes["sibling"] = f"r{len(self.world.prompts) - 1}"
        capacity = (self.world.cache.num_blocks - 1) * size
        if 3 * size <= limits.max_context <= capacity + 1:
            wishes["overflow"] = overflow
        return wishes

    @precondition(lambda self: self.world.live or self.world.finished)
    @rule(
        which=st.integers(0, 5),
        drop=st.integers(0, 23),
        max_tokens=st.integers(1, 4),
        min_tokens=st.integers(0, 3),
        steps=st.integers(0, 3),
    )
    def follow(self, which, drop, max_tokens, min_tokens, steps):
        """A prompt made of the tokens of another request, live or finished."""
        earlier = [*self.world.live.values(), *self.world.finished.values()]
        chosen = earlier[which % len(earlier)]
        params = SamplingParams(max_tokens, min_tokens, stop_ids=frozenset({STOP}))
        self.submit(chosen.tokens[: 24 - drop], params, chosen.salt)
        self.step(steps)

    @precondition(lambda self: self.oddities < 3)
    @rule(prompt=st.lists(st.integers(0, 1), max_size=30), max_tokens=st.integers(1, 30))
    def add_anything(self, prompt, max_tokens):
        """Mostly refused, so only now and then."""
        self.oddities += 1
        self.submit(prompt, SamplingParams(max_tokens), "")

    def submit(self, prompt, params, salt, **wishes):
        refusal = self.refusal(prompt, params.max_tokens)
        try:
            self.world.add(prompt, params, salt=salt, **wishes)
        except (InvalidField, QueueFull) as error:
            assert type(error) is refusal
        else:
            assert refusal is None

    def refusal(self, prompt, max_tokens):
        limits, world = self.world.limits, self.world
        stored = min(len(prompt) + max_tokens, limits.max_context) - 1
        if not prompt:
            return InvalidField
        if len(prompt) >= limits.max_context:
            return PromptTooLong
        if stored > (world.cache.num_blocks - 1) * world.cache.block_size:
            return InvalidField
        scheduler = world.scheduler
        seats = 0 if scheduler._queue.no_room else limits.max_seqs - len(scheduler.running)
        if len(scheduler.waiting) >= limits.max_queue + seats:
            return QueueFull
        return None

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.world.step()
            self.world.check()

    @rule(
        kind=st.sampled_from(["abort", "poison", "preempt", "poison", "crash", "flush", "spoil"]),
        victim=st.integers(0, 40),
    )
    def disturb(self, kind, victim):
        world = self.world
        if kind == "abort":  # a live request, one that ended, or one that never was
            names = [*world.live, *list(world.prompts)[:2], "nobody"]
            world.abort(names[victim % len(names)])
        elif kind == "crash":
            world.crash()
        elif kind == "flush":
            world.cache.flush()
        elif kind == "spoil":  # what is on the shelf; slots that were changed are never used again
            world.shelf.changed.update(sorted(world.shelf.kept)[victim % 8 : victim % 8 + 1])
        elif kind == "preempt" and world.scheduler.running:  # at any moment, pressure or none
            world.scheduler._preempt_newest()
        elif kind == "poison" and world.live:
            names = list(world.live)[: world.limits.max_seqs]  # those that may run
            world.step(poisoned=frozenset({names[victim % len(names)]}))

    @invariant()
    def holds(self):
        if self.world is not None:
            self.world.check()

    def teardown(self):
        if self.world is None:
            return
        if self.drain_at_end:
            self.world.drain()
        for name in list(self.world.live):
            self.world.abort(name)
        self.world.check_empty()
