"""Random walks with kept sequences: what they hold is theirs, and they are in nobody's way."""

from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ropewalk.cache.types import Op
from ropewalk.model.config import Pooling
from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import (
    ImpossibleOperation,
    InvalidField,
    QueueFull,
    SequenceBusy,
    SequenceNotFound,
)
from ropewalk.server.scheduling.kept import EXPIRES_S, MOST, Asked, new_id
from ropewalk.server.scheduling.request import Limits
from tests.server.machine import FAMILIES, SALTS, ProvenanceMachine, search
from tests.server.provenance import World

REFUSALS = (InvalidField, QueueFull, SequenceBusy, SequenceNotFound, ImpossibleOperation)


class KeptWorld(World):
    """Knows besides what each kept sequence must hold."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.kept = self.scheduler.kept
        self.held: dict[str, list] = {}  # by id

    def add(self, prompt, params, *, origin=None, **more):
        request = super().add(prompt, params, origin=origin, **more)
        if origin is not None:
            self.contents[request.id] = list(self.held[origin.id])
        return request

    def plan(self):
        plan = super().plan()
        if plan.preempted or self.scheduler._queue.no_room:
            assert not self.kept.ids, "what is kept gives way first"
        return plan

    def note(self, event) -> None:
        request = self.live[event.request_id]
        if request.pooling is None or event.error is not None:
            return super().note(event)
        self.finished[request.id] = self.live.pop(request.id)
        return None

    def check(self) -> None:
        for request in [*self.finished.values()]:
            if request.keep and request.id in self.contents:
                self.held[request.keep] = self.contents.pop(request.id)
        super().check()
        assert len(self.kept.ids) <= MOST
        for kept in self.kept.all():
            table, size = self.cache.table(kept.id), self.cache.block_size
            computed, held = self.cache.computed(kept.id), self.held[kept.id]
            assert len(table.blocks) == -(-computed // size), "no room is kept besides"
            assert 0 < computed <= len(kept.tokens)
            for index in range(computed):
                slot = table.blocks[index // size] * size + index % size
                assert self.slots[slot] == held[index], "a kept sequence holds other entries"
            if not kept.altered:
                assert held[computed - 1] == (kept.salt, kept.tokens[:computed])
        if len(self.kept.ids) > 1:
            blocks = {b for id_ in self.kept.ids for b in self.cache.table(id_).blocks}
            assert len(blocks) * self.cache.block_size <= self.kept.most_tokens

    def operate(self, kept, asked) -> None:
        size, onto = self.cache.block_size, self.held.get(asked.onto)
        end = asked.first + asked.count
        held = self.held[kept.id][: self.cache.computed(kept.id)]
        after = self.kept.apply(kept, asked).after
        if asked.op in (Op.FORK, Op.TRUNCATE):
            self.held[after.id] = held[: asked.count]
        elif asked.op is Op.MOVE_SPAN:
            before = self.cache.computed(after.id) - asked.count
            self.held[after.id] = onto[:before] + held[asked.first : end]
        else:
            self.held[after.id] = held[: asked.first] + held[end:]
        assert asked.first % size == 0

    def check_empty(self) -> None:
        for id_ in [*self.kept.ids]:
            self.kept.drop(id_)
        super().check_empty()


class KeptMachine(ProvenanceMachine):
    """As its base, with more blocks, of which the kept sequences may have a share."""

    world: KeptWorld | None = None

    @initialize(
        blocks=st.sampled_from([33, 25, 17, 13, 9]),
        size=st.sampled_from([2, 3, 1, 4]),
        seqs=st.sampled_from([4, 3, 2, 1]),
        budget=st.sampled_from([12, 6, 3]),
        context=st.sampled_from([24, 24, 12]),
        waiting=st.sampled_from([8, 4, 1]),
        collide=st.booleans(),
        spill=st.sampled_from([0, 0, 20, 4]),
        at_once=st.sampled_from([1, 2, 9]),
        drain=st.booleans(),
        crowd=st.lists(st.tuples(st.integers(0, 3), st.integers(3, 16)), min_size=1, max_size=4),
    )
    def start(self, crowd, **shape):
        self.begin(KeptWorld, **shape)
        for family, length in crowd:
            self.keep(family, length, salt="", answer=0, steps=4)

    @rule(
        family=st.integers(0, 3),
        length=st.integers(1, 16),
        salt=st.sampled_from(SALTS),
        answer=st.integers(0, 6),
        steps=st.integers(0, 4),
    )
    def keep(self, family, length, salt, answer, steps):
        """A prompt, or with an answer that too."""
        self.ask(FAMILIES[family][:length], answer, new_id(), salt=salt)
        self.step(steps)

    @precondition(lambda self: self.world.kept.ids)
    @rule(
        which=st.integers(0, 15),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        answer=st.sampled_from([0, 3, 0, 6]),
        how=st.sampled_from(["append", "share", "append", "keep"]),
        steps=st.sampled_from([3, 1, 0, 6]),
    )
    def go_on(self, which, more, answer, how, steps):
        kept = self.chosen(which)
        try:
            kept = self.world.kept.to_continue(kept.id, kept.client)
        except REFUSALS:
            return
        name = {"share": "", "keep": new_id(), "append": kept.id}[how]
        pooled = how != "share" and not answer
        tokens = [*kept.tokens, *more][: self.world.limits.max_context - answer]
        self.ask(tokens, answer if not pooled else 0, name, kept)
        self.step(steps)

    @precondition(lambda self: self.world.kept.ids)
    @rule(
        which=st.integers(0, 15),
        op=st.sampled_from([Op.FORK, Op.TRUNCATE, Op.EVICT_KEEP, Op.EVICT_RENUMBER, Op.MOVE_SPAN]),
        first=st.integers(0, 5),
        count=st.integers(1, 24),
        onto=st.integers(0, 15),
    )
    def operate(self, which, op, first, count, onto):
        world, kept, size = self.world, self.chosen(which), self.world.cache.block_size
        computed = world.cache.computed(kept.id)
        full = max(1, computed // size)
        asked = Asked(op, count=1 + count % computed)
        if op not in (Op.FORK, Op.TRUNCATE):
            first %= full
            asked = replace(asked, first=first * size, count=(1 + count % (full - first)) * size)
        if op is Op.MOVE_SPAN:
            others = [other for other in world.kept.all() if other is not kept]
            whole = [other for other in others if not world.cache.computed(other.id) % size]
            onto = (whole or others or [kept])[onto % len(whole or others or [kept])]
            asked = replace(asked, onto=onto.id, count=size)
        with suppress(*REFUSALS):
            world.operate(world.kept.get(kept.id, kept.client), asked)
        world.check()

    @precondition(lambda self: self.world.kept.ids)
    @rule(which=st.integers(0, 15), time=st.booleans())
    def give_up(self, which, time):
        if time:
            self.world.now += EXPIRES_S / 2
        else:
            self.world.kept.drop(self.chosen(which).id)

    def chosen(self, which):
        kept = self.world.kept.all()
        return kept[which % len(kept)]

    def ask(self, tokens, answer, name, origin=None, salt=""):
        pooling = None if answer or not name else Pooling.LAST
        params = SamplingParams(max_tokens=max(answer, 1))
        more = {"salt": salt if origin is None else origin.salt, "keep": name, "pooling": pooling}
        with suppress(*REFUSALS):
            self.world.add(tokens, params, origin=origin, **more)


TestKept = KeptMachine.TestCase
TestKept.settings = search(60)


def test_half_of_an_altered_sequence_is_not_gone_on_with():
    """What is left of it was computed among other tokens than those that would be computed anew."""
    world = KeptWorld(9, 2, Limits(2, 12, 24, 8), spill=(20, 9))

    def run(prompt, tokens, **more):
        request = world.add(prompt, SamplingParams(max_tokens=tokens), **more)
        world.step()
        return request

    run([0, 1, 1, 0], 1, keep="seq-a", pooling=Pooling.LAST)
    world.check()
    world.operate(world.kept.get("seq-a", ""), Asked(Op.EVICT_RENUMBER, first=0, count=2))
    kept = world.kept.to_continue("seq-a", "")
    request = run([*kept.tokens, 1, 0, 1], 9, origin=kept)
    assert "/" not in world.contents[request.id][0][0] and request.computed == 5
    world.scheduler._preempt_newest()
    world.kept.drop("seq-a")
    world.cache.save_ahead()
    (parked,) = world.cache._parked.values()
    for entry in parked.contents[1:]:
        world.cache._keeper._lose(entry)
    world.step()
    world.check()
    assert request.id not in world.shifted
    world.drain()
