"""A fake engine whose cache remembers where every entry came from.

Each slot stores the salt and all tokens up to and including its own: what real K and V depend on,
whatever the positional encoding. What is computed after a request has dropped part of its context
depends on more than the visible tokens, so it is unique to that request. The fake attention asserts
that a block table leads to exactly the request's own entries at their own positions; the next
token is a pure function of all tokens, so every finished request can be compared with running
alone.
"""

import random
import zlib
from collections.abc import Iterable, Sequence

from ropewalk.cache.keeper import Moves
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.rearranging import Copy
from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import RequestFailed
from ropewalk.server.scheduling.request import (
    FinishReason,
    Limits,
    Overflow,
    Plan,
    Request,
    Sampled,
    TokenEvent,
    Work,
)
from ropewalk.server.scheduling.scheduler import Scheduler
from tests.cache.bookkeeping import Bookkeeping

STOP = 1
Content = tuple[str, tuple[int, ...]]
ENDLESS = 10**9


def next_token(context: Sequence[int], vocabulary: int = 2) -> int:
    return zlib.crc32(bytes(context)) % vocabulary


def solo(prompt: Sequence[int], params: SamplingParams, context: int) -> list[int]:
    """The tokens of a request that runs alone."""
    tokens = list(prompt)
    while len(tokens) < context and len(tokens) - len(prompt) < params.max_tokens:
        tokens.append(next_token(tokens))
        generated = len(tokens) - len(prompt)
        if tokens[-1] in params.stop_ids and generated >= params.min_tokens:
            break
    return tokens


def colliding_digest(parent: bytes, salt: str, tokens: bytes) -> bytes:
    return bytes([zlib.crc32(parent + salt.encode() + tokens) % 7])


def plain(request: Request, index: int) -> Content:
    """An entry that depends only on the tokens that the model sees."""
    return request.salt, tuple(request.context(0, index + 1))


def own(request: Request, index: int) -> Content:
    """An entry that also depends on tokens that have been dropped since."""
    return f"{request.salt}/{request.id}", tuple(request.tokens[: index + 1 + request.dropped])


class Shelf:
    """A second place for the blocks of a world; what is on it may change."""

    def __init__(self, world: "World", slots: int, at_once: int) -> None:
        self.world = world
        self.slots = slots
        self.at_once = at_once
        self.moves = Moves()
        self.kept: dict[int, list[Content | None]] = {}
        self.moved = False  # in this step
        self.changed: set[int] = set()  # slots

    def put(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            assert 0 < slot <= self.slots
            self.kept[slot] = self.world.slots[self.span(block)]
            self.changed.discard(slot)
        self.moves += Moves(out=len(blocks))

    def take(self, slots: Sequence[int], blocks: Sequence[int]) -> list[bool]:
        self.moved = True
        intact = [slot not in self.changed for slot in slots]
        for block, slot, good in zip(blocks, slots, intact, strict=True):
            held = self.kept[slot] if good else [None] * self.world.cache.block_size
            self.world.slots[self.span(block)] = held
        self.moves += Moves(back=intact.count(True), changed=intact.count(False))
        return intact

    def span(self, block: int) -> slice:
        size = self.world.cache.block_size
        return slice(block * size, (block + 1) * size)


class World:
    """Cache manager, scheduler and fake model, checked after every operation.

    spill: slots of a second place, and how many blocks a step may move.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        *,
        spill: tuple[int, int] = (0, 0),
        **options,
    ) -> None:
        self.limits = limits
        self.now = 0.0
        self.shelf = Shelf(self, *spill)
        options["place"] = self.shelf if self.shelf.slots else None
        self.cache = CacheManager(num_blocks, block_size, **options)
        operations = Bookkeeping(self.cache, copied=self.copy)
        self.scheduler = Scheduler(self.cache, limits, operations, clock=self.tick)
        self.slots: list[Content | None] = [None] * (num_blocks * block_size)
        self.contents: dict[str, list[Content]] = {}  # what each running request must read
        self.shifted: set[str] = set()  # dropped some of what is cached
        self.dropped: dict[str, int] = {}  # by each, when it was last computed
        self.live: dict[str, Request] = {}  # in the order they were added
        self.prompts: dict[str, list[int]] = {}
        self.finished: dict[str, Request] = {}
        self.ended = 0
        self.preemptions = 0
        self.shifts = self.forks = 0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def copy(self, copy: Copy) -> None:
        size = self.cache.block_size
        here, there = copy.source * size, copy.target * size
        self.slots[there : there + size] = self.slots[here : here + size]
        self.forks += 1

    def add(
        self, prompt: Iterable[int], params: SamplingParams, *, name: str = "", **more
    ) -> Request:
        """`more`: salt, overflow or sibling of the request."""
        tokens = list(prompt)
        name = name or f"r{len(self.prompts)}"
        request = Request(name, tokens, len(tokens), params, self.now, random.Random(0), **more)
        self.scheduler.add(request)
        self.live[name] = request
        self.prompts[name] = list(tokens)
        return request

    def step(self, poisoned: frozenset[str] = frozenset()) -> list[TokenEvent]:
        """One step; requests named in `poisoned` store garbage and fail if they are in it."""
        plan = self.plan()
        sampled = {}
        for work in plan.work:
            request = work.request
            if request.id in poisoned:
                self.scribble(work)
                sampled[request.id] = Sampled(0, error=RequestFailed("bad"))
                continue
            self.read(request, work.start + work.count)
            if work.samples:
                sampled[request.id] = Sampled(next_token(request.tokens))
        events = self.scheduler.record(plan, sampled)
        assert [e.request_id for e in events] == list(sampled), "one event for each result"
        for event in events:
            self.note(event)
        return events

    def crash(self) -> None:
        """A step whose forward pass raises after storing garbage: nothing is recorded."""
        for work in self.plan().work:
            self.scribble(work)

    def abort(self, name: str) -> None:
        request = self.scheduler.abort(name)
        assert request is self.live.pop(name, None), "abort is idempotent"
        assert self.scheduler.abort(name) is None

    def plan(self) -> Plan:
        """Plan a step and do its writes."""
        ran = list(self.scheduler.running)
        waited = [request for request in self.scheduler.waiting if request.preemptions == 0]
        before = {r.id: (r.preemptions, r.dropped) for r in ran}
        self.shelf.moved = False
        plan = self.scheduler.plan()
        self.preemptions += plan.preempted
        self.shifts += len(plan.shifts)
        factor = self.limits.lone_factor if len(self.live) == 1 else 1
        most = self.limits.max_step_tokens * factor
        assert sum(work.count for work in plan.work) <= most  # SC2
        assert len({work.request.id for work in plan.work}) == len(plan.work)
        assert len(plan.work) <= self.limits.max_seqs
        if self.live and not self.shelf.moved:  # SC5: the oldest request always progresses
            assert plan.work and plan.work[0].request is next(iter(self.live.values()))
        if plan.preempted:
            assert all(any(work.request is each for each in ran) for work in plan.work)
        assert all(any(request is each for each in waited) for request in plan.admitted)
        written: set[int] = set()
        for work in plan.work:
            request = work.request
            assert work.start == request.computed, "chunks cover the tokens exactly once"
            assert 1 <= work.count <= request.context_length - work.start  # PC3
            self.follow(work, before.get(request.id))
            for position in range(work.start, work.start + work.count):
                slot = self.slot(request.id, position)
                assert slot not in written, "two tokens are written to one slot"
                written.add(slot)
                self.slots[slot] = self.contents[request.id][position]
        return plan

    def follow(self, work: Work, before: tuple[int, int] | None) -> None:
        """What the request's entries are to be once this work is written."""
        request, name = work.request, work.request.id
        if before is None or before[0] != request.preemptions:  # admitted in this step
            self.shifted.discard(name)
            here = [self.slots[self.slot(name, index)] for index in range(work.start)]
            anew = [plain(request, index) for index in range(work.start)]
            left = self.contents.get(name, [])
            if request.dropped > self.dropped.get(name, 0):
                gone = request.dropped - self.dropped.get(name, 0)
                del left[request.front : request.front + gone]
            if here != anew and here == left[: work.start]:  # it was kept, and had been shifted
                self.shifted.add(name)
                anew = here
            self.contents[name] = anew
        elif request.dropped > before[1]:
            self.shifted.add(name)
            gone = request.dropped - before[1]
            del self.contents[name][request.front : request.front + gone]
        self.dropped[name] = request.dropped
        made = [
            own(request, index) if name in self.shifted else plain(request, index)
            for index in range(work.start, work.start + work.count)
        ]
        self.contents[name][work.start :] = made

    def scribble(self, work: Work) -> None:
        for position in range(work.start, work.start + work.count):
            self.slots[self.slot(work.request.id, position)] = None

    def slot(self, name: str, position: int) -> int:
        table, size = self.cache.table(name), self.cache.block_size
        index = position // size
        assert index < len(table.blocks), f"{name} has no room for position {position}"
        assert table.bases[index] == index * size
        assert 0 < table.blocks[index] < self.cache.num_blocks  # BP4
        return table.blocks[index] * size + position - table.bases[index]

    def read(self, request: Request, upto: int) -> None:
        """What attention does: the table must lead to the request's own tokens[:upto]."""
        for position, expected in enumerate(self.contents.get(request.id, [])[:upto]):
            assert self.slots[self.slot(request.id, position)] == expected, (
                f"{request.id} reads another entry at position {position}"
            )

    def note(self, event: TokenEvent) -> None:
        assert (event.token is None) == (event.finish is FinishReason.ERROR)
        if event.finish is None:
            return
        request = self.live.pop(event.request_id)
        if event.finish is not FinishReason.ERROR:
            self.finished[request.id] = request
            context = self.limits.max_context if request.overflow is Overflow.REFUSE else ENDLESS
            alone = solo(self.prompts[request.id], request.params, context)
            assert request.tokens == alone  # SC7, SC8, SC10

    def check(self) -> None:
        """Checks what must hold between any two operations."""
        self.cache.check()
        self.scheduler.check()
        scheduled = [*self.scheduler.running, *self.scheduler.waiting]
        assert [r.id for r in scheduled] == list(self.live)  # SC1, SC3: still in order of arrival
        for request in self.scheduler.running:
            self.read(request, request.computed)
        for entry in self.cache._index.entries:  # PC4
            self.check_entry(entry)
        counts, usable = self.cache.counts(), self.cache.num_blocks - 1
        assert counts.free + counts.active + counts.cached == usable  # BP1
        held = {block for name in self.cache.sequences for block in self.cache.table(name).blocks}
        assert counts.active == len(held)
        self.ended += len(self.scheduler.drain_ended())
        assert self.ended + len(self.live) == len(self.prompts)

    def check_entry(self, entry) -> None:
        chain, size = [], self.cache.block_size
        link = entry
        while link is not None:
            chain.append(memoryview(link.tokens).cast("q").tolist())
            link = link.parent
        tokens = tuple(token for part in reversed(chain) for token in part)
        for offset in range(size):
            upto = len(tokens) - size + offset + 1
            for held in self.contents_of(entry):
                assert held[offset] == (entry.salt, tokens[:upto]), "a published block has changed"

    def contents_of(self, entry) -> Iterable[list[Content | None]]:
        """What its block holds, and its slot."""
        if entry.block:
            yield self.slots[self.shelf.span(entry.block)]
        if entry.stored and entry.slot not in self.shelf.changed:
            yield self.shelf.kept[entry.slot]

    def drain(self) -> None:
        """Run until idle. Every step the oldest request gains a token, which bounds the steps.

        Or blocks come back for it, which may happen again for every token of another one.
        """
        bound = sum(r.num_prompt + r.params.max_tokens for r in self.live.values())
        bound *= 1 + self.cache.num_blocks * (self.shelf.slots > 0)
        for _ in range(bound):
            if not self.live:
                break
            self.step()
            self.check()
        assert not self.live, "livelock"
        self.check_empty()

    def check_empty(self) -> None:
        """BP10: nothing is held, nobody is remembered."""
        self.check()
        assert self.cache.counts().active == 0
        assert not self.cache.sequences and not self.cache.parked
        assert not self.scheduler.running and not self.scheduler.waiting
        assert not self.scheduler.plan().work
