"""Keeps content that nobody holds: published prefixes, and what preempted sequences left.

Content stays in its block until that is overwritten, and is copied to the second place before, if
there is one: at the latest when the block is taken, better ahead of that. Integers only: copying is
a `Place`'s job.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ropewalk.cache.prefix import Entry, Kept, PrefixIndex
from ropewalk.cache.types import InvariantError

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks that were moved since the start."""

    out: int = 0
    back: int = 0
    changed: int = 0  # those that did not come back, as they were not what was put there

    def __add__(self, more: "Moves") -> "Moves":
        return Moves(self.out + more.out, self.back + more.back, self.changed + more.changed)

    def __sub__(self, earlier: "Moves") -> "Moves":
        return Moves(
            self.out - earlier.out, self.back - earlier.back, self.changed - earlier.changed
        )


class Place(Protocol):
    """Where blocks are copied to, into slots 1 to `slots`."""

    @property
    def slots(self) -> int: ...

    @property
    def at_once(self) -> int:
        """How many blocks a step may move without being noticeably slower."""
        ...

    @property
    def moves(self) -> Moves: ...

    def put(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots."""
        ...

    def take(self, slots: Sequence[int], blocks: Sequence[int]) -> list[bool]:
        """Copy slots into blocks; which of them are what was put there."""
        ...


@dataclass(frozen=True, slots=True)
class SpillCounts:
    """Slots of the second place by what they hold, and the blocks moved since the start."""

    free: int = 0
    waiting: int = 0  # what preempted sequences will come back for
    cached: int = 0  # prefixes, which are given up when room is needed
    moves: Moves = Moves()


class Slots:
    """Gives slots of a place to contents. One that nobody waits for gives way to another."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count, 0, -1))
        self._spare: OrderedDict[Kept, None] = OrderedDict()  # stored; nobody waits for it

    @property
    def counts(self) -> tuple[int, int, int]:
        """Free slots, those that somebody waits for, and the others."""
        free, spare = len(self._free), len(self._spare)
        return free, self._count - free - spare, spare

    def reserve(self, kept: Kept) -> bool:
        """Give it a free slot, unless it has one; False if none is free."""
        if not kept.slot and self._free:
            kept.slot = self._free.pop()
        return kept.slot > 0

    def oldest_spare(self) -> Kept | None:
        return next(iter(self._spare), None)

    def spare(self, kept: Kept) -> None:
        """Nobody waits for it any more."""
        if kept.stored:
            self._spare[kept] = None
            self._spare.move_to_end(kept)
        else:
            self.release(kept)

    def need(self, kept: Kept) -> None:
        """Somebody waits for it."""
        self._spare.pop(kept, None)

    def release(self, kept: Kept, *, retire: bool = False) -> None:
        """Free its slot; `retire`: never use that one again."""
        self._spare.pop(kept, None)
        if kept.slot and not retire:
            self._free.append(kept.slot)
        if kept.slot and retire:
            self._count -= 1
        kept.slot, kept.stored = 0, False

    def check(self) -> None:
        """Raises InvariantError unless no slot is given twice."""
        spare = [kept.slot for kept in self._spare]
        if len({*self._free, *spare}) != len(self._free) + len(spare):
            raise InvariantError("a slot of the second place is given twice")
        if any(kept.wanted or not kept.stored for kept in self._spare):
            raise InvariantError("a slot that somebody waits for may be given up")


class Keeper:
    """What the blocks of a cache hold besides the running sequences' own. `place`: the second one.

    Content that a preempted sequence waits for always leaves its block before that is overwritten,
    if it has a slot. A prefix does only as far as the step may move further blocks.
    """

    def __init__(self, index: PrefixIndex, place: Place | None) -> None:
        self.cached: set[int] = set()  # blocks that nobody holds and whose content is kept
        self.evicted = 0  # cached blocks whose content was given up to make room
        self.arrived: set[int] = set()  # cached blocks verified on their way back from the place
        self._index = index
        self._place = place
        self._slots = Slots(place.slots if place else 0)
        self._own: dict[int, Kept] = {}  # by block: wanted, and not or no longer published
        # Cached blocks whose content is in no slot; the next to be taken is first.
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        self._moves = 0  # blocks that this step may still move

    def counts(self) -> SpillCounts:
        return SpillCounts(*self._slots.counts, self._place.moves if self._place else Moves())

    def at(self, block: int) -> Kept | None:
        """What is kept of a block's content."""
        return self._index.entry(block) or self._own.get(block)

    # ------------------------------------------------------------- as blocks change hands

    def freed(self, blocks: Iterable[int]) -> None:
        """Nobody holds these blocks any more."""
        for block in blocks:
            kept = self.at(block)
            if kept is None:
                continue
            self.cached.add(block)
            if self._place is not None and not kept.stored:
                self._unsaved[block] = None

    def held(self, blocks: Iterable[int]) -> None:
        """Somebody holds these blocks, for their content."""
        for block in blocks:
            self._no_longer_cached(block)

    def vacate(self, blocks: Iterable[int]) -> None:
        """These blocks are about to be overwritten: what they hold moves out, or is lost."""
        leaving = [kept for block in blocks if (kept := self.at(block)) is not None]
        if not leaving:
            return
        unsaved = [kept for kept in leaving if not kept.stored]
        self._save([kept for kept in unsaved if kept.wanted])
        others = [kept for kept in unsaved if not kept.wanted]
        self._save(others[: max(0, self._moves)])
        for kept in leaving:
            if kept.stored:
                self._leave(kept)
            elif kept.block:  # else withdrawn with a prefix that it continues
                self.evicted += self._lose(kept)

    # ------------------------------------------------------------------- who waits for what

    def want(self, blocks: Sequence[int]) -> list[Kept]:
        """Keep what these blocks hold until `release`, the first ones rather than the last."""
        contents = []
        for block in blocks:
            kept = self.at(block)
            if kept is None:
                kept = self._own[block] = Kept(block)
            contents.append(kept)
        self.pin(contents)
        for kept in contents:
            if not self._has_slot(kept):
                break
        return contents

    def pin(self, contents: Iterable[Kept]) -> None:
        """Nothing of it may be given up until `release`."""
        for kept in contents:
            kept.wanted += 1
            self._slots.need(kept)

    def release(self, contents: Sequence[Kept]) -> None:
        """One sequence less waits for it."""
        for kept in reversed(contents):  # so that a prefix outlives what continues it
            kept.wanted -= 1
            if kept.wanted or kept.lost:
                continue
            if self._index.current(kept):
                self._slots.spare(kept)
            else:
                self._drop(kept)

    def withdraw(self, block: int) -> None:
        """No sequence may find the block's content, except one that waits for it."""
        entry = self._index.entry(block)
        if entry is not None:
            self._unpublish(self._index.withdraw(entry))

    def condemn(self, block: int) -> None:
        """The block no longer holds what it did."""
        kept = self.at(block)
        if kept is None:
            return
        if kept.stored:
            self._leave(kept)
        else:
            self._lose(kept)

    def flush(self) -> int:
        """Withdraw all prefixes; returns how many were cached."""
        gone = 0
        for entry in self._index.entries:
            if self._index.current(entry):
                gone += self._unpublish(self._index.withdraw(entry))
        return gone

    # ------------------------------------------------------------------------- moving blocks

    def begin_step(self, *, alone: bool) -> None:
        """Count moves anew. `alone`: no running sequence would wait for them."""
        at_once = self._place.at_once if self._place else 0
        self._moves = UNLIMITED if alone else at_once

    def may_fetch(self, count: int) -> int:
        """How many of so many blocks may be brought back in this step."""
        most = min(count, max(0, self._moves))
        unsaved = map(self.at, islice(self._unsaved, most))
        if any(kept is not None and kept.wanted for kept in unsaved):
            return -(-most // 2)  # the block that one comes to may have to be saved first
        return most

    def fetch(self, contents: Sequence[Kept], blocks: Sequence[int]) -> None:
        """Bring contents back into blocks taken for it. What has changed meanwhile is lost."""
        assert self._place is not None, "contents without a block are in a place"
        self._moves -= len(blocks)
        self.vacate(blocks)
        intact = self._place.take([kept.slot for kept in contents], blocks)
        for kept, block, good in zip(contents, blocks, intact, strict=True):
            if not good:
                self._lose(kept, retire=True)
                continue
            self.arrived.add(block)
            if self._index.current(kept):
                self._index.enter(kept, block)
            else:
                kept.block, self._own[block] = block, kept

    def save_ahead(self) -> None:
        """Store what will be overwritten next, so that it costs nothing when that happens."""
        most = min(self._moves, self._place.at_once) if self._place else 0
        if most > 0 and self._unsaved:
            chosen = (self.at(block) for block in islice(self._unsaved, most))
            self._save([kept for kept in chosen if kept is not None])

    def _save(self, contents: Sequence[Kept]) -> None:
        if not contents or self._place is None:
            return
        contents = [kept for kept in contents if self._has_slot(kept)]
        contents = [kept for kept in contents if kept.block]  # not withdrawn to make room
        if not contents:
            return
        self._moves -= len(contents)
        blocks = [kept.block for kept in contents]
        self._place.put(blocks, [kept.slot for kept in contents])
        for kept in contents:
            self._unsaved.pop(kept.block, None)
            kept.stored = True
            if not kept.wanted:
                self._slots.spare(kept)

    def _has_slot(self, kept: Kept) -> bool:
        """Reserve a slot for it if it has none, for which the oldest prefix may have to go."""
        oldest = self._slots.oldest_spare()
        if not kept.slot and not self._slots.counts[0] and oldest is not None:
            self._slots.release(oldest)
            if isinstance(oldest, Entry) and not oldest.block:
                self.evicted += self._unpublish(self._index.withdraw(oldest))
        # It may have been among those withdrawn, now or before, as a continuation.
        return (kept.wanted > 0 or self._index.current(kept)) and self._slots.reserve(kept)

    # ------------------------------------------------------------------------- giving it up

    def _lose(self, kept: Kept, *, retire: bool = False) -> int:
        """Its content is gone; returns how many cached prefixes are."""
        gone = 0
        self._slots.release(kept, retire=retire)
        if self._index.current(kept):
            gone = self._unpublish(self._index.withdraw(kept))
        self._drop(kept)
        return gone

    def _leave(self, kept: Kept) -> None:
        """It is in the second place only."""
        self._no_longer_cached(kept.block)
        self._own.pop(kept.block, None)
        if self._index.current(kept):
            self._index.leave(kept)
        kept.block = 0

    def _unpublish(self, entries: Iterable[Entry]) -> int:
        """Give up withdrawn entries that nobody waits for; returns how many were cached."""
        gone = 0
        for entry in entries:
            if entry.wanted and entry.block:
                self._own[entry.block] = entry
            elif not entry.wanted:
                gone += entry.block in self.cached or not entry.block
                self._drop(entry)
        return gone

    def _drop(self, kept: Kept) -> None:
        self._slots.release(kept)
        self._no_longer_cached(kept.block)
        self._own.pop(kept.block, None)
        kept.block = 0

    def _no_longer_cached(self, block: int) -> None:
        self.cached.discard(block)
        self.arrived.discard(block)
        self._unsaved.pop(block, None)

    def check(self, idle: set[int], waiting: Iterable[Sequence[Kept]]) -> None:
        """Raises InvariantError unless what is kept agrees.

        idle: blocks that nobody holds. waiting: what each parked sequence will come back for.
        """
        self._index.check()
        wanted = Counter(kept for contents in waiting for kept in contents)
        everything = {*wanted, *self._index.entries, *self._own.values()}
        if any(kept.wanted != wanted[kept] for kept in everything):
            raise InvariantError("somebody waits for what is not kept for it, or nobody does")
        if sum(kept.slot > 0 for kept in everything) != sum(self._slots.counts[1:]):
            raise InvariantError("a slot of the second place has leaked")
        kept = idle & (self._index.blocks | self._own.keys())
        if kept != self.cached:
            raise InvariantError(f"cached blocks {self.cached} are not the idle ones {kept}")
        for block, own in self._own.items():
            if own.block != block or not own.wanted or self._index.entry(block):
                raise InvariantError(f"what block {block} holds is kept for nobody")
        if not self._unsaved.keys() <= self.cached:
            raise InvariantError("a block that is not cached is to be saved")
        self._slots.check()
