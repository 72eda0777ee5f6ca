"""Which blocks hold which sequence. Integers only: no tensors, no requests, no model.

A sequence reserves room, has tokens computed into it, commits them, and is released. Blocks
that are full and committed are published, so later sequences with the same beginning share
them. A published or shared block is never written again. A sequence that must make room is parked
instead of released: what it had computed is kept for it, for as long as possible.
"""

from array import array
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from ropewalk.cache.block_pool import BlockPool, InvariantError
from ropewalk.cache.keeper import Keeper, Place, SpillCounts
from ropewalk.cache.prefix import Digest, Entry, Kept, Observer, PrefixIndex, sound
from ropewalk.cache.types import BlockEvent, EventKind


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; together they are the pool less its reserved block 0."""

    free: int
    active: int  # held by at least one sequence, counted once
    cached: int  # free to reuse but still holding published content
    quarantined: int = 0  # out of use for good; one that is still held counts as active


class Copy(NamedTuple):
    """Request to copy the content of one block into another."""

    source: int
    target: int


class Table(NamedTuple):
    """A sequence's blocks in order; position of a token = base of its block + offset."""

    blocks: Sequence[int]
    bases: Sequence[int]


@dataclass(slots=True)
class _Sequence:
    salt: str
    # 64-bit arrays: every step copies them whole, and copying a list takes ten times as long.
    blocks: "array[int]"
    bases: "array[int]"
    computed: int  # committed tokens
    settled: int  # leading blocks that were shared, published or passed over
    tip: Entry | None  # published entry with the content of the last settled block
    chained: bool  # False: no further block can be published


class _Parked(NamedTuple):
    """A sequence that gave up its blocks, and what is kept of them."""

    sequence: _Sequence
    contents: list[Kept]


class CacheManager:
    """Reservation, prefix sharing and release over one pool of `num_blocks` blocks.

    `digest` replaces the prefix index's default hash, which uses a random key. `place`: where what
    is kept goes before its block is overwritten; without one, parking is the same as releasing.
    `observer` is told which prefixes can be shared.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_sharing: bool = True,
        digest: Digest | None = None,
        place: Place | None = None,
        observer: Observer | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens holds nothing; use 1 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._sharing = prefix_sharing
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(block_size, digest, observer)
        self._keeper = Keeper(self._index, place)
        self._keeps = place is not None
        self._sequences: dict[str, _Sequence] = {}
        self._parked: dict[str, _Parked] = {}
        self._events: list[BlockEvent] = []

    @property
    def sequences(self) -> KeysView[str]:
        """Names of the sequences that hold blocks."""
        return self._sequences.keys()

    @property
    def parked(self) -> KeysView[str]:
        """Names of the sequences that were parked and did not come back yet."""
        return self._parked.keys()

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks whose content was given up to make room."""
        return self._keeper.evicted

    @property
    def capacity(self) -> int:
        """The most tokens that a single sequence can store; shrinks with each quarantine."""
        return self._pool.num_usable * self.block_size

    def reserve(
        self,
        seq: str,
        tokens: Sequence[int],
        upto: int,
        *,
        salt: str = "",
        share: bool = True,
        own: int | None = None,
    ) -> int | None:
        """Make room for tokens[:upto]; returns how many tokens are already computed.

        A new `seq` first takes the longest published prefix of `tokens` with the same salt (if
        `share`), but never all of them: at least one token is left to compute, in a block of its
        own. Nor does it take those from number `own` on, which must be its own computations. A
        parked `seq` takes what was kept for it instead, unless that is less. A known `seq` grows
        and ignores `salt` and `share`. Returns None, and changes nothing, when there is no room.
        """
        if not 0 < upto <= len(tokens):
            raise ValueError(f"cannot reserve {upto} of {len(tokens)} tokens")
        sequence = self._sequences.get(seq)
        if sequence is None:
            return self._open(seq, tokens, upto, salt, self._shareable(tokens, share, own))
        return sequence.computed if self.grow(seq, upto) else None

    def begin_step(self, *, alone: bool) -> None:
        """A step is planned; `alone`: no running sequence waits for blocks that are moved."""
        self._keeper.begin_step(alone=alone)

    def save_ahead(self) -> None:
        """Copy some of what would be overwritten next to the second place, if blocks get scarce."""
        if self._parked or self._pool.num_untouched < self.num_blocks // 2:
            self._keeper.save_ahead()

    def fetch(
        self,
        seq: str,
        tokens: Sequence[int],
        upto: int,
        *,
        salt: str = "",
        share: bool = True,
        own: int | None = None,
    ) -> bool:
        """Bring what `reserve` would take back from the second place, as far as a step may.

        Returns whether nothing more is to be waited for; so also when there is no room.
        """
        if not self._keeps:
            return True
        found, _ = self._found(seq, tokens, salt, self._shareable(tokens, share, own))
        absent = [kept for kept in found if not kept.block]
        here = [kept.block for kept in found if kept.block]
        held = sum(self._pool.refs(block) > 0 for block in here)
        if not absent or -(-upto // self.block_size) - held > self._pool.num_free:
            return True
        # What is here already must not be overwritten to make room for the rest.
        self._pool.refresh(block for block in reversed(here) if not self._pool.refs(block))
        coming = absent[: self._keeper.may_fetch(len(absent))]
        if coming:
            self._keeper.pin(found)
            blocks = self._pool.take(len(coming))
            assert blocks is not None, "there was room for more"
            self._keeper.fetch(coming, blocks)
            self._keeper.release(found)
            self._keeper.freed(self._pool.give_back(reversed(blocks)))
        return len(coming) == len(absent) and not any(kept.lost for kept in found)

    def park(self, seq: str) -> None:
        """Give up `seq`'s blocks, but keep what they hold for when it is reserved again."""
        if not self._keeps:
            return self.release(seq)
        sequence = self._sequences.pop(seq)
        stored = sequence.blocks[: -(-sequence.computed // self.block_size)]
        retired = self._pool.retired
        contents = self._keeper.want(list(takewhile(lambda each: each not in retired, stored)))
        self._parked[seq] = _Parked(sequence, contents)
        self._give_back(seq, sequence.blocks[len(contents) :], sequence.bases[len(contents) :])
        # Verified when they leave, or when they are taken up again.
        self._keeper.freed(self._pool.give_back(reversed(sequence.blocks[: len(contents)])))

    def intact(self, seq: str) -> bool:
        """Whether everything that a parked `seq` had computed is still kept."""
        return not any(kept.lost for kept in self._parked[seq].contents)

    def forget(self, seq: str) -> None:
        """A parked `seq` will not come back; any other is ignored."""
        parked = self._parked.pop(seq, None)
        if parked is not None:
            self._keeper.release(parked.contents)

    def grow(self, seq: str, upto: int) -> bool:
        """Make room for `upto` tokens of a known `seq`; False, and unchanged, if there is none."""
        sequence = self._sequences[seq]
        missing = -(-upto // self.block_size) - len(sequence.blocks)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            self._extend(sequence, self._take(seq, missing))
        return True

    def commit(self, seq: str, tokens: Sequence[int], computed: int) -> None:
        """Record that tokens[:computed] are stored now; publish the blocks that this filled."""
        sequence = self._sequences[seq]
        room = min(len(tokens), len(sequence.blocks) * self.block_size)
        if not sequence.computed <= computed <= room:
            raise ValueError(
                f"cannot commit {computed} tokens over {sequence.computed} with room for {room}"
            )
        sequence.computed = computed
        if computed // self.block_size > sequence.settled:
            self._settle(seq, tokens)

    def release(self, seq: str, *, forget: bool = False) -> None:
        """Give up all of `seq`'s blocks; KeyError if unknown.

        `forget` also withdraws what it published or shared, because its content may be bad.
        """
        sequence = self._sequences.pop(seq)
        if forget:
            for block in sequence.blocks:
                self._keeper.withdraw(block)
        self._give_back(seq, sequence.blocks, sequence.bases)

    def fork(self, seq: str, child: str, length: int) -> list[Copy] | None:
        """A new sequence `child` that begins as the first `length` computed tokens of `seq`.

        Full blocks are shared. A partly filled last block is copied, as both sequences would write
        into it. Returns None, and changes nothing, when there is no room for the copy.
        """
        parent = self._sequences[seq]
        if child in self._sequences:
            raise ValueError(f"the sequence {child!r} exists already")
        if not 0 < length <= parent.computed:
            raise ValueError(f"cannot fork at {length}: {seq} has {parent.computed} tokens")
        full, rest = divmod(length, self.block_size)
        if rest and not self._pool.num_free:
            return None
        forked = _Sequence(
            salt=parent.salt,
            blocks=parent.blocks[:full],
            bases=parent.bases[: full + bool(rest)],
            computed=length,
            settled=parent.settled,
            tip=parent.tip,
            chained=parent.chained,
        )
        self._share(child, forked.blocks)
        self._rewind(forked)
        self._sequences[child] = forked
        if not rest:
            return []
        copy = Copy(parent.blocks[full], self._take(child, 1)[0])
        forked.blocks.append(copy.target)
        return [copy]

    def truncate(self, seq: str, length: int) -> list[Copy] | None:
        """Forget the tokens after the first `length`; at least one is kept.

        The last block will be written again, so this sequence must be its only holder. Returns
        None, and changes nothing, when it is shared and there is no room for a copy.
        """
        sequence = self._sequences[seq]
        if not 0 < length <= sequence.computed:
            raise ValueError(f"cannot truncate {seq} to {length} of {sequence.computed} tokens")
        kept = -(-length // self.block_size)
        rewritten = range(kept - bool(length % self.block_size), kept)
        freed = self._freed(sequence, range(kept, len(sequence.blocks)))
        if self._shared(sequence, rewritten) > self._pool.num_free + freed:
            return None
        self._drop_blocks(seq, kept, len(sequence.blocks) - kept)
        sequence.computed = length
        self._rewind(sequence)
        return self._own(seq, rewritten)

    def evict(
        self, seq: str, first: int, count: int, *, renumber: bool, rewrite: bool
    ) -> list[Copy] | None:
        """Drop `count` full blocks starting at `first`. What follows is never published again.

        With `renumber` the later blocks close the gap. With `rewrite` as well, their content is
        about to change, so they leave the prefix index and shared ones are copied. Returns None,
        and changes nothing, when there is no room for the copies.
        """
        sequence = self._sequences[seq]
        self._require_full(seq, first, count)
        later = range(first + count, len(sequence.blocks))
        rewritten = later if renumber and rewrite else range(0)
        freed = self._freed(sequence, range(first, first + count))
        if self._shared(sequence, rewritten) > self._pool.num_free + freed:
            return None
        self._drop_blocks(seq, first, count)
        sequence.computed -= count * self.block_size
        if renumber:
            for index in range(first, len(sequence.blocks)):
                sequence.bases[index] -= count * self.block_size
        self._end_chain(sequence)
        if not rewritten:
            return []
        return self._own(seq, range(first, len(sequence.blocks)))

    def move(
        self, source: str, first: int, count: int, target: str, *, rewrite: bool
    ) -> list[Copy] | None:
        """Append full blocks of `source` to `target`, which must end with a full block.

        They are shared, or copied when `rewrite` says that their content is about to change.
        Returns None, and changes nothing, when there is no room for the copies.
        """
        origin, goal = self._sequences[source], self._sequences[target]
        self._require_full(source, first, count)
        if goal.computed != len(goal.blocks) * self.block_size:
            raise ValueError(f"{target} does not end with a full block")
        moved = origin.blocks[first : first + count]
        copies: list[Copy] = []
        if rewrite:
            if count > self._pool.num_free:
                return None
            copies = [Copy(*pair) for pair in zip(moved, self._take(target, count), strict=True)]
            self._extend(goal, [copy.target for copy in copies])
        elif set(moved) & set(goal.blocks):
            raise ValueError(f"{target} holds some of these blocks already")
        else:
            self._share(target, moved)
            self._extend(goal, moved)
        goal.computed += count * self.block_size
        self._end_chain(goal)
        return copies

    def shared(self, seq: str, index: int) -> bool:
        """Whether other sequences also hold block number `index` of `seq`."""
        return self._pool.refs(self._sequences[seq].blocks[index]) > 1

    def computed(self, seq: str) -> int:
        """Committed tokens of `seq`."""
        return self._sequences[seq].computed

    def table(self, seq: str) -> Table:
        """The live table of `seq`: read it at once; do not keep or change it."""
        sequence = self._sequences[seq]
        return Table(sequence.blocks, sequence.bases)

    def quarantine(self, block: int) -> None:
        """Take `block` out of use for good: at once if it is free, else once nobody holds it.

        The block and all that continue it are withdrawn from the prefix index. Its holders keep
        it until they are released.
        """
        self._keeper.condemn(block)
        self._pool.retire(block)

    def flush(self) -> int:
        """Withdraw everything published; returns how many cached blocks were forgotten.

        Blocks held by sequences stay theirs, but no other sequence can find them, nor the blocks
        that their holders fill after them.
        """
        return self._keeper.flush()

    def holders(self, block: int) -> list[str]:
        """Sequences whose table has `block`."""
        return [name for name, sequence in self._sequences.items() if block in sequence.blocks]

    def drain_events(self) -> list[BlockEvent]:
        """What happened to blocks since the last call, in order."""
        events, self._events = self._events, []
        return events

    def spilled(self) -> SpillCounts:
        """What the second place holds, and how often it was used."""
        return self._keeper.counts()

    def counts(self) -> BlockCounts:
        free, cached = self._pool.num_free, len(self._keeper.cached)
        quarantined = sum(self._pool.refs(block) == 0 for block in self._pool.retired)
        active = self.num_blocks - 1 - free - quarantined
        return BlockCounts(free - cached, active, cached, quarantined)

    def check(self) -> None:
        """Raises InvariantError unless pool, prefix index and tables agree with each other."""
        self._pool.check()
        self._check_tables()
        free = {block for block in range(1, self.num_blocks) if self._pool.refs(block) == 0}
        waiting = [parked.contents for parked in self._parked.values()]
        self._keeper.check(free - self._pool.retired, waiting)
        if self._sequences.keys() & self._parked.keys():
            raise InvariantError("a sequence that holds blocks is parked")
        if self._index.blocks & self._pool.retired:
            raise InvariantError("a quarantined block is published")

    def _shareable(self, tokens: Sequence[int], share: bool, own: int | None) -> int:
        """How many leading blocks may be those of other sequences."""
        if not (share and self._sharing):
            return 0
        most = len(tokens) - 1 if own is None else min(own, len(tokens) - 1)
        return most // self.block_size

    def _found(
        self, seq: str, tokens: Sequence[int], salt: str, most: int
    ) -> tuple[list[Kept], _Sequence | None]:
        """What a new or parked sequence can begin with, and the parked one if it is its own."""
        parked = self._parked.get(seq)
        kept = [] if parked is None else sound(parked.contents)
        if parked is not None and len(kept) == len(parked.contents):
            return kept, parked.sequence
        published = self._index.match(salt, tokens, most)
        if parked is None or len(published) > len(kept):
            return list(published), None
        return kept, parked.sequence

    def _open(self, seq: str, tokens: Sequence[int], upto: int, salt: str, most: int) -> int | None:
        found, parked = self._found(seq, tokens, salt, most)
        found = list(takewhile(lambda kept: kept.block, found))  # the rest was not fetched
        hits = [kept.block for kept in found]
        growth = max(0, -(-upto // self.block_size) - len(hits))
        idle = sum(self._pool.refs(block) == 0 for block in hits)
        if growth + idle > self._pool.num_free:
            return None
        sequence = self._beginning(found, salt) if parked is None else self._resumed(found, parked)
        # Hits first: blocks that are held cannot be evicted to make room for the rest.
        self._share(seq, hits)
        self.forget(seq)
        self._extend(sequence, self._take(seq, growth))
        self._sequences[seq] = sequence
        return sequence.computed

    def _beginning(self, found: Sequence[Kept], salt: str) -> _Sequence:
        """A sequence that begins with published blocks."""
        sequence = _Sequence(
            salt=salt,
            blocks=array("q"),
            bases=array("q"),
            computed=len(found) * self.block_size,
            settled=len(found),
            tip=self._index.entry(found[-1].block) if found else None,
            chained=self._sharing,
        )
        self._extend(sequence, [kept.block for kept in found])
        return sequence

    def _resumed(self, found: Sequence[Kept], parked: _Sequence) -> _Sequence:
        """A parked sequence as it was, or as much of it as is still kept."""
        blocks = array("q", [kept.block for kept in found])
        computed = min(parked.computed, len(found) * self.block_size)
        resumed = replace(
            parked, blocks=blocks, bases=parked.bases[: len(found)], computed=computed
        )
        self._rewind(resumed)
        return resumed

    def _extend(self, sequence: _Sequence, blocks: Sequence[int]) -> None:
        for block in blocks:
            # After an eviction that kept positions, a base exceeds the number of slots before it.
            base = sequence.bases[-1] + self.block_size if sequence.bases else 0
            sequence.bases.append(base)
            sequence.blocks.append(block)

    def _note(self, kind: EventKind, seq: str, blocks: Iterable[int]) -> None:
        self._events.extend(BlockEvent(kind, block, seq) for block in blocks)

    def _take(self, seq: str, count: int) -> list[int]:
        taken = self._pool.take(count)
        if taken is None:
            raise InvariantError(f"{count} blocks are wanted after room for them was found")
        self._keeper.vacate(taken)
        self._note(EventKind.TAKEN, seq, taken)
        return taken

    def _share(self, seq: str, blocks: Sequence[int]) -> None:
        self._pool.share(blocks)
        unverified = [block for block in blocks if block not in self._keeper.arrived]
        self._keeper.held(blocks)
        self._note(EventKind.REUSED, seq, unverified)

    def _give_back(self, seq: str, blocks: Sequence[int], bases: Sequence[int]) -> None:
        for block, base in zip(blocks, bases, strict=True):
            self._events.append(BlockEvent(EventKind.RELEASED, block, seq, base))
        # Tail first, so that the continuation of a prefix is evicted before the prefix itself.
        self._keeper.freed(self._pool.give_back(reversed(blocks)))

    def _drop_blocks(self, seq: str, first: int, count: int) -> None:
        sequence = self._sequences[seq]
        span = slice(first, first + count)
        dropped, bases = sequence.blocks[span], sequence.bases[span]
        del sequence.blocks[span], sequence.bases[span]
        self._give_back(seq, dropped, bases)

    def _shared(self, sequence: _Sequence, indices: range) -> int:
        return sum(self._pool.refs(sequence.blocks[index]) > 1 for index in indices)

    def _freed(self, sequence: _Sequence, indices: range) -> int:
        """How many of these blocks are free to take once this sequence gives them up."""
        blocks = (sequence.blocks[index] for index in indices)
        return sum(self._pool.refs(each) == 1 and each not in self._pool.retired for each in blocks)

    def _own(self, seq: str, indices: range) -> list[Copy]:
        """Make blocks unpublished and held by `seq` alone; the caller has checked for room."""
        sequence = self._sequences[seq]
        copies = []
        for index in indices:
            block = sequence.blocks[index]
            if self._pool.refs(block) == 1:
                self._keeper.vacate([block])
                self._note(EventKind.TAKEN, seq, [block])
                continue
            copies.append(Copy(block, self._take(seq, 1)[0]))
            sequence.blocks[index] = copies[-1].target
            self._give_back(seq, [block], [sequence.bases[index]])
        return copies

    def _rewind(self, sequence: _Sequence) -> None:
        """After `computed` went back: take the last full block's entry as the tip again."""
        full = sequence.computed // self.block_size
        if full >= sequence.settled:
            return
        sequence.settled = full
        sequence.tip = self._index.entry(sequence.blocks[full - 1]) if full else None
        # A private duplicate of a published block has no entry of its own to continue from.
        sequence.chained = sequence.chained and (full == 0 or sequence.tip is not None)

    def _end_chain(self, sequence: _Sequence) -> None:
        """Stop publishing: later content depends on more than the tokens before it."""
        sequence.settled = sequence.computed // self.block_size
        sequence.tip = None
        sequence.chained = False

    def _require_full(self, seq: str, first: int, count: int) -> None:
        full = self._sequences[seq].computed // self.block_size
        if first < 0 or count < 1 or first + count > full:
            raise ValueError(
                f"blocks {first} to {first + count - 1} of {seq} are not all full: {full} are"
            )

    def _settle(self, seq: str, tokens: Sequence[int]) -> None:
        """Publish newly full blocks, each as the continuation of the one before.

        A block whose tokens are already published by another block stays private, and its
        successors continue that other block's entry: equal tokens, equal content.
        """
        sequence = self._sequences[seq]
        filled = range(sequence.settled, sequence.computed // self.block_size)
        self._note(EventKind.FILLED, seq, (sequence.blocks[index] for index in filled))
        for index in filled:
            tip, block = sequence.tip, sequence.blocks[index]
            if tip is not None and not self._index.current(tip):
                sequence.chained = False
            if block in self._pool.retired:
                sequence.chained = False
            if sequence.chained:
                sequence.tip = self._index.publish(block, tokens, index, sequence.salt, tip)
                sequence.chained = sequence.tip is not None
            sequence.settled += 1

    def _check_tables(self) -> None:
        refs = [0] * self.num_blocks
        published = self._index.blocks
        for name, sequence in self._sequences.items():
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise InvariantError(f"{name} holds a block twice: {list(sequence.blocks)}")
            if len(sequence.blocks) * self.block_size < sequence.computed:
                raise InvariantError(f"{name} has more tokens than room")
            for index, block in enumerate(sequence.blocks):
                refs[block] += 1
                writable = (index + 1) * self.block_size > sequence.computed
                if writable and (block in published or self._pool.refs(block) != 1):
                    raise InvariantError(f"{name} still writes block {block}, which is shared")
        for block, count in enumerate(refs):
            if count != self._pool.refs(block):
                raise InvariantError(
                    f"block {block} is in {count} tables but has {self._pool.refs(block)} holders"
                )
