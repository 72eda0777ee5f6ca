"""Rearranges the blocks of sequences: forks, truncations, evictions and moves. Integers only.

What becomes of the content of blocks, where it is tied to a position, is operations.py's affair.
"""

from collections.abc import MutableMapping
from typing import NamedTuple

from ropewalk.cache.block_pool import Blocks, Held
from ropewalk.cache.prefix import PrefixIndex


class Copy(NamedTuple):
    """Request to copy the content of one block into another."""

    source: int
    target: int


class Rearranger:
    """Of one cache, in blocks of `size` tokens. `sequences`: those that hold blocks, by name."""

    def __init__(
        self, sequences: MutableMapping[str, Held], blocks: Blocks, index: PrefixIndex, size: int
    ) -> None:
        self._sequences = sequences
        self._blocks = blocks
        self._pool = blocks.pool
        self._index = index
        self._size = size

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
        full, rest = divmod(length, self._size)
        if rest and not self._pool.num_free:
            return None
        forked = Held(
            salt=parent.salt,
            blocks=parent.blocks[:full],
            bases=parent.bases[: full + bool(rest)],
            computed=length,
            settled=parent.settled,
            tip=parent.tip,
            chained=parent.chained,
        )
        self._blocks.share(child, forked.blocks)
        forked.rewind(self._index, self._size)
        self._sequences[child] = forked
        if not rest:
            return []
        copy = Copy(parent.blocks[full], self._blocks.take(child, 1)[0])
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
        kept = -(-length // self._size)
        rewritten = range(kept - bool(length % self._size), kept)
        freed = self._freed_by(sequence, range(kept, len(sequence.blocks)))
        if self._shared(sequence, rewritten) > self._pool.num_free + freed:
            return None
        self._drop_blocks(seq, kept, len(sequence.blocks) - kept)
        sequence.computed = length
        sequence.rewind(self._index, self._size)
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
        freed = self._freed_by(sequence, range(first, first + count))
        if self._shared(sequence, rewritten) > self._pool.num_free + freed:
            return None
        self._drop_blocks(seq, first, count)
        sequence.computed -= count * self._size
        if renumber:
            for index in range(first, len(sequence.blocks)):
                sequence.bases[index] -= count * self._size
        sequence.end_chain(self._size)
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
        if goal.computed != len(goal.blocks) * self._size:
            raise ValueError(f"{target} does not end with a full block")
        moved = origin.blocks[first : first + count]
        copies: list[Copy] = []
        if rewrite:
            if count > self._pool.num_free:
                return None
            taken = self._blocks.take(target, count)
            copies = [Copy(*pair) for pair in zip(moved, taken, strict=True)]
            goal.extend(taken, self._size)
        elif set(moved) & set(goal.blocks):
            raise ValueError(f"{target} holds some of these blocks already")
        else:
            self._blocks.share(target, moved)
            goal.extend(moved, self._size)
        goal.computed += count * self._size
        goal.end_chain(self._size)
        return copies

    def _drop_blocks(self, seq: str, first: int, count: int) -> None:
        sequence = self._sequences[seq]
        span = slice(first, first + count)
        dropped, bases = sequence.blocks[span], sequence.bases[span]
        del sequence.blocks[span], sequence.bases[span]
        self._blocks.give_back(seq, dropped, bases)

    def _shared(self, sequence: Held, indices: range) -> int:
        return sum(self._pool.refs(sequence.blocks[index]) > 1 for index in indices)

    def _freed_by(self, sequence: Held, indices: range) -> int:
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
                self._blocks.overwrite(seq, [block])
                continue
            copies.append(Copy(block, self._blocks.take(seq, 1)[0]))
            sequence.blocks[index] = copies[-1].target
            self._blocks.give_back(seq, [block], [sequence.bases[index]])
        return copies

    def _require_full(self, seq: str, first: int, count: int) -> None:
        full = self._sequences[seq].computed // self._size
        if first < 0 or count < 1 or first + count > full:
            raise ValueError(
                f"blocks {first} to {first + count - 1} of {seq} are not all full: {full} are"
            )
