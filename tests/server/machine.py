"""Random walks over the scheduler and the cache, for Hypothesis to search."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.sampling import SamplingParams
from server.request import InvalidField, PromptTooLong, QueueFull
from server.scheduler import Limits
from tests.server.provenance import STOP, World, colliding_digest

SALTS = ("", "a", "b")


class ProvenanceMachine(RuleBasedStateMachine):
    """2–9 blocks of 1–4 tokens, vocabulary 2, three salts, a digest of seven values or the real."""

    world: World | None = None

    @initialize(
        blocks=st.integers(2, 9),
        size=st.integers(1, 4),
        seqs=st.integers(1, 4),
        budget=st.integers(1, 9),
        context=st.integers(2, 24),
        waiting=st.integers(1, 6),
        collide=st.booleans(),
        drain=st.booleans(),
    )
    def start(self, blocks, size, seqs, budget, context, waiting, collide, drain):
        limits = Limits(seqs, budget, context, waiting)
        options = {"digest": colliding_digest} if collide else {"hash_key": b"fixed"}
        self.world = World(blocks, size, limits, **options)
        self.drain_at_end = drain

    @rule(
        fresh=st.lists(st.integers(0, 1), max_size=8),
        old=st.integers(0, 5),
        keep=st.integers(0, 12),
        salt=st.sampled_from(SALTS),
        max_tokens=st.integers(1, 8),
        min_tokens=st.integers(0, 3),
        stops=st.booleans(),
        scored=st.booleans(),
    )
    def add(self, fresh, old, keep, salt, max_tokens, min_tokens, stops, scored):
        """A prompt that continues the beginning of an earlier sequence, or a fresh one."""
        world = self.world
        earlier = [*world.live.values(), *world.finished.values()][-old:] if old else []
        prompt = [*(earlier[0].tokens[:keep] if earlier else []), *fresh]
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_ids=frozenset({STOP}) if stops else frozenset(),
            prompt_logprobs=0 if scored else None,
        )
        refusal = self.refusal(prompt, max_tokens)
        try:
            world.add(prompt, params, salt=salt)
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
        if len(world.scheduler.waiting) >= limits.max_waiting:
            return QueueFull
        return None

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.world.step()
            self.world.check()

    @rule(victim=st.integers(0, 40))
    def abort(self, victim):
        """A live request, one that ended, or one that never was."""
        names = [*self.world.live, *self.world.prompts, "nobody"]
        self.world.abort(names[victim % len(names)])

    @precondition(lambda self: self.world.live)
    @rule(victim=st.integers(0, 9))
    def poison(self, victim):
        names = list(self.world.live)
        self.world.step(poisoned=frozenset({names[victim % len(names)]}))

    @rule()
    def crash(self):
        self.world.crash()

    @precondition(lambda self: self.world.scheduler.running)
    @rule()
    def preempt(self):
        """Preemption at any moment, pressure or none."""
        self.world.scheduler._preempt_newest()

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
