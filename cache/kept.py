"""Content of blocks that outlives whoever computed it, in the cache or in a second place.

Published prefixes are kept for others, and what a preempted sequence had computed for itself. A
block that nobody holds is overwritten sooner or later; what it holds is copied to the second place
before that, while there is room. Integers only: the copying is a `Place`'s job.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk.cache.block_pool import InvariantError


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

    def put(self, blocks: Sequence[int], slots: Sequence[int]) -> list[bool]:
        """Copy blocks into slots; which of them were sound."""
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


class Kept:
    """What a block holds or held. It is lost once it is neither in a block nor stored."""

    __slots__ = ("block", "slot", "stored", "wanted")

    def __init__(self, block: int) -> None:
        self.block = block  # of the cache; 0: in none
        self.slot = 0  # of the second place, perhaps only reserved; 0: none
        self.stored = False  # in its slot
        self.wanted = 0  # sequences that left it and will come back for it

    @property
    def lost(self) -> bool:
        return not self.block and not self.stored


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


def sound(contents: Iterable[Kept]) -> list[Kept]:
    """Those before the first that is lost."""
    found = []
    for kept in contents:
        if kept.lost:
            break
        found.append(kept)
    return found
