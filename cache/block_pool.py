"""Block ids: how many hold each, in which order a sequence holds them, and how they change hands.

Knows integers only: no tensors, no requests. A block that nobody holds keeps its content until it
is the least recently freed one, so the order of the free list is the order of eviction.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ropewalk.cache.keeper import Keeper
from ropewalk.cache.prefix import Entry, PrefixIndex
from ropewalk.cache.types import BlockEvent, EventKind, InvariantError


class BlockPool:
    """Ids 1 to num_blocks − 1, least recently freed first; every operation O(1) per block.

    Block 0 is reserved and never handed out: padding entries of block tables point at it, so
    a pool of N blocks has N − 1 usable ones, less those that were retired.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out; use 2 or more")
        self.num_blocks = num_blocks
        self._refs = array("q", bytes(8 * num_blocks))
        # Ordered, because taking the first key of a plain dict walks over every removed one.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._retired: set[int] = set()
        self.num_untouched = num_blocks - 1  # never handed out; they are first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1 - len(self._retired)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        """How many holders `block` has."""
        return self._refs[block]

    @property
    def holders(self) -> "array[int]":
        """How many holders each block has, by id: a copy."""
        return self._refs[:]

    @property
    def retired(self) -> frozenset[int]:
        """Blocks that are never handed out again, whether still held or not."""
        return frozenset(self._retired)

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks with one holder each, oldest first; None, taking none, if too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        self.num_untouched = max(0, self.num_untouched - count)
        return taken

    def refresh(self, blocks: Iterable[int]) -> None:
        """Free blocks become the last ones to be handed out."""
        for block in blocks:
            self._free.move_to_end(block)

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block; a free one leaves the free list with its content."""
        for block in blocks:
            self._require_usable(block)
            if self._refs[block] == 0:
                if block in self._retired:
                    raise InvariantError(f"block {block} is shared but was retired")
                del self._free[block]
            self._refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> list[int]:
        """One holder fewer for each block, in the given order; returns those now free.

        A retired block is never free again.

        Raises InvariantError for a block that nobody holds (a double free).
        """
        freed = []
        for block in blocks:
            self._require_usable(block)
            if self._refs[block] == 0:
                raise InvariantError(f"block {block} is given back but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block] == 0 and block not in self._retired:
                self._free[block] = None
                freed.append(block)
        return freed

    def retire(self, block: int) -> None:
        """Never hand `block` out again: from now if it is free, else once nobody holds it."""
        self._require_usable(block)
        self._retired.add(block)
        self._free.pop(block, None)

    def check(self) -> None:
        """Raises InvariantError unless each block is either free, held, or retired and unheld."""
        if self._refs[0] != 0 or 0 in self._free:
            raise InvariantError("the reserved block 0 is in use")
        if min(self._refs) < 0:
            raise InvariantError("a reference count is negative")
        unheld = {block for block in range(1, self.num_blocks) if self._refs[block] == 0}
        if unheld - self._retired != set(self._free):
            raise InvariantError(
                f"free list {sorted(self._free)} is not the unheld blocks {sorted(unheld)} less "
                f"the retired ones {sorted(self._retired)}"
            )

    def _require_usable(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise InvariantError(f"block {block} is not one of 1 to {self.num_blocks - 1}")


@dataclass(slots=True)
class Held:
    """The blocks that one sequence holds, and how far their content is published."""

    salt: str
    # 64-bit arrays: every step copies them whole, and copying a list takes ten times as long.
    blocks: "array[int]"
    bases: "array[int]"
    computed: int  # committed tokens
    settled: int  # leading blocks that were shared, published or passed over
    tip: Entry | None  # published entry with the content of the last settled block
    chained: bool  # False: no further block can be published

    def extend(self, blocks: Iterable[int], size: int) -> None:
        """Hold further blocks of `size` tokens."""
        for block in blocks:
            # After an eviction that kept positions, a base exceeds the number of slots before it.
            self.bases.append(self.bases[-1] + size if self.bases else 0)
            self.blocks.append(block)

    def rewind(self, index: PrefixIndex, size: int) -> None:
        """After `computed` went back: take the last full block's entry as the tip again."""
        full = self.computed // size
        if full >= self.settled:
            return
        self.settled = full
        self.tip = index.entry(self.blocks[full - 1]) if full else None
        # A private duplicate of a published block has no entry of its own to continue from.
        self.chained = self.chained and (full == 0 or self.tip is not None)

    def end_chain(self, size: int) -> None:
        """Stop publishing: later content depends on more than the tokens before it."""
        self.settled = self.computed // size
        self.tip = None
        self.chained = False


class Blocks:
    """A pool's blocks as they change hands, of which the keeper learns, and who drains events."""

    def __init__(self, pool: BlockPool, keeper: Keeper) -> None:
        self.pool = pool
        self.keeper = keeper
        self._events: list[BlockEvent] = []

    def take(self, seq: str, count: int) -> list[int]:
        """Free blocks to be overwritten by `seq`; the caller has checked that there are some."""
        taken = self.pool.take(count)
        if taken is None:
            raise InvariantError(f"{count} blocks are wanted after room for them was found")
        self.overwrite(seq, taken)
        return taken

    def overwrite(self, seq: str, blocks: Sequence[int]) -> None:
        """`seq`, their only holder, is about to overwrite them."""
        self.keeper.vacate(blocks)
        self._note(EventKind.TAKEN, seq, blocks)

    def fill(self, seq: str, blocks: Iterable[int]) -> None:
        """All slots of these are stored and committed."""
        self._note(EventKind.FILLED, seq, blocks)

    def share(self, seq: str, blocks: Sequence[int]) -> None:
        """`seq` holds them, too, for their content."""
        self.pool.share(blocks)
        unverified = [block for block in blocks if block not in self.keeper.arrived]
        self.keeper.held(blocks)
        self._note(EventKind.REUSED, seq, unverified)

    def pass_on(self, seq: str, blocks: Sequence[int]) -> None:
        """Another sequence holds them in the place of `seq`, for their content."""
        self._note(EventKind.REUSED, seq, blocks)

    def give_back(self, seq: str, blocks: Sequence[int], bases: Sequence[int]) -> None:
        """`seq` holds them no longer."""
        for block, base in zip(blocks, bases, strict=True):
            self._events.append(BlockEvent(EventKind.RELEASED, block, seq, base))
        # Tail first, so that the continuation of a prefix is evicted before the prefix itself.
        self.keeper.freed(self.pool.give_back(reversed(blocks)))

    def drain_events(self) -> list[BlockEvent]:
        """What happened to blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _note(self, kind: EventKind, seq: str, blocks: Iterable[int]) -> None:
        self._events.extend(BlockEvent(kind, block, seq) for block in blocks)
