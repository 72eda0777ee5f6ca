"""Which blocks hold which sequence. Integers only: no tensors, no requests, no model.

A sequence reserves room, has tokens computed into it, commits them, and is released. Blocks
that are full and committed are published, so later sequences with the same beginning share
them. A published or shared block is never written again. A sequence that must make room is parked
instead of released: what it had computed is kept for it, for as long as possible.
"""

from array import array
from collections.abc import KeysView, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from ropewalk.cache.block_pool import BlockPool, Blocks, Held
from ropewalk.cache.keeper import Keeper, Place, SpillCounts
from ropewalk.cache.prefix import Digest, Kept, Observer, PrefixIndex, sound
from ropewalk.cache.rearranging import Rearranger
from ropewalk.cache.types import BlockEvent, InvariantError


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; together they are the pool less its reserved block 0."""

    free: int
    active: int  # held by at least one sequence, counted once
    cached: int  # free to reuse but still holding published content
    quarantined: int = 0  # out of use for good; one that is still held counts as active


class PoolView(NamedTuple):
    """What each block is for now; a copy."""

    holders: "array[int]"  # how many sequences hold it, by id; the first is the reserved block 0
    cached: frozenset[int]  # those that nobody holds and whose content is kept
    retired: frozenset[int]  # out of use for good, whether still held or not


class Table(NamedTuple):
    """A sequence's blocks in order; position of a token = base of its block + offset."""

    blocks: Sequence[int]
    bases: Sequence[int]


class _Parked(NamedTuple):
    """A sequence that gave up its blocks, and what is kept of them."""

    sequence: Held
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
        self._blocks = Blocks(self._pool, self._keeper)
        self._sequences: dict[str, Held] = {}
        self._parked: dict[str, _Parked] = {}
        self.rearranger = Rearranger(self._sequences, self._blocks, self._index, block_size)

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
        kept = len(contents)
        self._blocks.give_back(seq, sequence.blocks[kept:], sequence.bases[kept:])
        # Verified when they leave, or when they are taken up again.
        self._keeper.freed(self._pool.give_back(reversed(sequence.blocks[:kept])))

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
            sequence.extend(self._blocks.take(seq, missing), self.block_size)
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
        self._blocks.give_back(seq, sequence.blocks, sequence.bases)

    def rename(self, seq: str, name: str) -> None:
        """What `seq` holds is `name`'s from now on."""
        if name in self._sequences:
            raise ValueError(f"the sequence {name!r} exists already")
        self._sequences[name] = self._sequences.pop(seq)
        self._blocks.pass_on(seq, self._sequences[name].blocks)

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
        return self._blocks.drain_events()

    def spilled(self) -> SpillCounts:
        """What the second place holds, and how often it was used."""
        return self._keeper.counts()

    def counts(self) -> BlockCounts:
        free, cached = self._pool.num_free, len(self._keeper.cached)
        quarantined = sum(self._pool.refs(block) == 0 for block in self._pool.retired)
        active = self.num_blocks - 1 - free - quarantined
        return BlockCounts(free - cached, active, cached, quarantined)

    def pool(self) -> PoolView:
        """Every block's state. Takes a copy of each; `counts` sums them up."""
        return PoolView(self._pool.holders, frozenset(self._keeper.cached), self._pool.retired)

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
    ) -> tuple[list[Kept], Held | None]:
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
        self._blocks.share(seq, hits)
        self.forget(seq)
        sequence.extend(self._blocks.take(seq, growth), self.block_size)
        self._sequences[seq] = sequence
        return sequence.computed

    def _beginning(self, found: Sequence[Kept], salt: str) -> Held:
        """A sequence that begins with published blocks."""
        sequence = Held(
            salt=salt,
            blocks=array("q"),
            bases=array("q"),
            computed=len(found) * self.block_size,
            settled=len(found),
            tip=self._index.entry(found[-1].block) if found else None,
            chained=self._sharing,
        )
        sequence.extend((kept.block for kept in found), self.block_size)
        return sequence

    def _resumed(self, found: Sequence[Kept], parked: Held) -> Held:
        """A parked sequence as it was, or as much of it as is still kept."""
        blocks = array("q", [kept.block for kept in found])
        computed = min(parked.computed, len(found) * self.block_size)
        resumed = replace(
            parked, blocks=blocks, bases=parked.bases[: len(found)], computed=computed
        )
        resumed.rewind(self._index, self.block_size)
        return resumed

    def _settle(self, seq: str, tokens: Sequence[int]) -> None:
        """Publish newly full blocks, each as the continuation of the one before.

        A block whose tokens are already published by another block stays private, and its
        successors continue that other block's entry: equal tokens, equal content.
        """
        sequence = self._sequences[seq]
        filled = range(sequence.settled, sequence.computed // self.block_size)
        self._blocks.fill(seq, (sequence.blocks[index] for index in filled))
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
