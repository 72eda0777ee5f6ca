"""Which blocks hold which sequence. Integers only: no tensors, no requests, no model.

A sequence reserves room, has tokens computed into it, commits them, and is released. Blocks
that are full and committed are published, so later sequences with the same beginning share
them. A published or shared block is never written again.
"""

from collections.abc import KeysView, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.block_pool import BlockPool, InvariantError
from cache.prefix import Digest, Entry, PrefixIndex


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Usable blocks by state; together they are the pool less its reserved block 0."""

    free: int
    active: int  # held by at least one sequence, counted once
    cached: int  # free to reuse but still holding published content


class Table(NamedTuple):
    """A sequence's blocks in order; position of a token = base of its block + offset."""

    blocks: Sequence[int]
    bases: Sequence[int]


@dataclass(slots=True)
class _Sequence:
    salt: str
    blocks: list[int]
    bases: list[int]
    computed: int  # committed tokens
    settled: int  # leading blocks that were shared, published or passed over
    tip: Entry | None  # stands for the last settled block
    chained: bool  # False: no further block can be published


class CacheManager:
    """Reservation, prefix sharing and release over one pool of `num_blocks` blocks.

    `digest` replaces the keyed hash of the prefix index; `hash_key` its random key.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_sharing: bool = True,
        hash_key: bytes | None = None,
        digest: Digest | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens holds nothing; use 1 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evicted_blocks = 0
        self._sharing = prefix_sharing
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(block_size, hash_key=hash_key, digest=digest)
        self._cached: set[int] = set()  # published and free
        self._sequences: dict[str, _Sequence] = {}

    @property
    def sequences(self) -> KeysView[str]:
        """Names of the sequences that hold blocks."""
        return self._sequences.keys()

    @property
    def capacity(self) -> int:
        """Tokens that one sequence alone can have stored."""
        return self._pool.num_usable * self.block_size

    def reserve(
        self, seq: str, tokens: Sequence[int], upto: int, *, salt: str = "", share: bool = True
    ) -> int | None:
        """Room for tokens[:upto]; returns how many tokens are computed already.

        A new `seq` first takes the longest published beginning of `tokens` with the same salt
        (if `share`), but never all of them: at least one token is left to compute, in a block
        of its own. A known `seq` grows; its `salt` and `share` are settled. None, and nothing
        at all has changed, when there is no room.
        """
        if not 0 < upto <= len(tokens):
            raise ValueError(f"cannot reserve {upto} of {len(tokens)} tokens")
        sequence = self._sequences.get(seq)
        if sequence is None:
            return self._open(seq, tokens, upto, salt, share)
        missing = -(-upto // self.block_size) - len(sequence.blocks)
        if missing > 0:
            if missing > self._pool.num_free:
                return None
            self._extend(sequence, self._take(missing))
        return sequence.computed

    def commit(self, seq: str, tokens: Sequence[int], computed: int) -> None:
        """tokens[:computed] are stored now; publishes the blocks that this filled."""
        sequence = self._sequences[seq]
        room = min(len(tokens), len(sequence.blocks) * self.block_size)
        if not sequence.computed <= computed <= room:
            raise ValueError(
                f"cannot commit {computed} tokens over {sequence.computed} with room for {room}"
            )
        sequence.computed = computed
        if computed // self.block_size > sequence.settled:
            self._settle(sequence, tokens)

    def release(self, seq: str, *, forget: bool = False) -> None:
        """Give up all of `seq`'s blocks; KeyError if unknown.

        `forget` also withdraws what it published or shared, for content that may be bad.
        """
        sequence = self._sequences.pop(seq)
        if forget:
            for block in sequence.blocks:
                self._cached.difference_update(self._index.drop(block))
        # Tail first: what continues a prefix is then evicted before the prefix itself.
        for block in self._pool.give_back(reversed(sequence.blocks)):
            if block in self._index:
                self._cached.add(block)

    def table(self, seq: str) -> Table:
        """The live table of `seq`: to be read at once, not kept and not changed."""
        sequence = self._sequences[seq]
        return Table(sequence.blocks, sequence.bases)

    def counts(self) -> BlockCounts:
        free, cached = self._pool.num_free, len(self._cached)
        return BlockCounts(free - cached, self._pool.num_usable - free, cached)

    def check(self) -> None:
        """Raises InvariantError unless pool, prefix index and tables agree with each other."""
        self._pool.check()
        self._index.check()
        self._check_tables()
        idle = {block for block in self._index.blocks if self._pool.refs(block) == 0}
        if idle != self._cached:
            raise InvariantError(f"cached blocks {self._cached} are not the idle ones {idle}")

    def _open(
        self, seq: str, tokens: Sequence[int], upto: int, salt: str, share: bool
    ) -> int | None:
        most = (len(tokens) - 1) // self.block_size
        found = self._index.match(salt, tokens, most) if share and self._sharing else []
        hits = [entry.block for entry in found]
        growth = max(0, -(-upto // self.block_size) - len(hits))
        idle = sum(self._pool.refs(block) == 0 for block in hits)
        if growth + idle > self._pool.num_free:
            return None
        # Hits first: held, they cannot be evicted to make room for the rest.
        self._pool.share(hits)
        self._cached.difference_update(hits)
        sequence = _Sequence(
            salt=salt,
            blocks=[],
            bases=[],
            computed=len(hits) * self.block_size,
            settled=len(hits),
            tip=found[-1] if found else None,
            chained=self._sharing,
        )
        self._extend(sequence, hits)
        self._extend(sequence, self._take(growth))
        self._sequences[seq] = sequence
        return sequence.computed

    def _extend(self, sequence: _Sequence, blocks: Sequence[int]) -> None:
        for block in blocks:
            sequence.bases.append(len(sequence.blocks) * self.block_size)
            sequence.blocks.append(block)

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        if taken is None:
            raise InvariantError(f"{count} blocks are wanted after room for them was found")
        for block in taken:
            lost = self._cached.intersection(self._index.drop(block))
            self._cached -= lost
            self.evicted_blocks += len(lost)
        return taken

    def _settle(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        """Publish newly full blocks, each after the one before it.

        A block whose tokens another block already stands for stays private, and its
        successors continue that other block's entry: equal tokens, equal content.
        """
        for index in range(sequence.settled, sequence.computed // self.block_size):
            tip = sequence.tip
            if tip is not None and not self._index.current(tip):
                sequence.chained = False
            if sequence.chained:
                block = sequence.blocks[index]
                sequence.tip = self._index.publish(block, tokens, index, sequence.salt, tip)
                sequence.chained = sequence.tip is not None
            sequence.settled += 1

    def _check_tables(self) -> None:
        refs = [0] * self.num_blocks
        published = self._index.blocks
        for name, sequence in self._sequences.items():
            if len(set(sequence.blocks)) != len(sequence.blocks):
                raise InvariantError(f"{name} holds a block twice: {sequence.blocks}")
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
