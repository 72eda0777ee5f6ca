"""Block ids with reference counts. Knows integers only: no tokens, no sequences, no tensors.

A block that nobody holds keeps its content until it is the least recently freed one, so the
order of the free list is the order of eviction.
"""

from collections import OrderedDict
from collections.abc import Iterable

from ropewalk.cache.types import InvariantError


class BlockPool:
    """Ids 1 to num_blocks − 1, least recently freed first; every operation O(1) per block.

    Block 0 is reserved and never handed out: padding entries of block tables point at it, so
    a pool of N blocks has N − 1 usable ones, less those that were retired.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out; use 2 or more")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        # Ordered, because taking the first key of a plain dict walks over every removed one.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._retired: set[int] = set()
        self._untouched = num_blocks - 1

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1 - len(self._retired)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_untouched(self) -> int:
        """Blocks that were never handed out; they are first."""
        return self._untouched

    def refs(self, block: int) -> int:
        """How many holders `block` has."""
        return self._refs[block]

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
        self._untouched = max(0, self._untouched - count)
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
