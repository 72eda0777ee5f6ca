"""The kept sequences of one model, with what their blocks hold, for who may change them.

Used on the engine's thread, between two steps; the results are copies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Op, OpReport
from ropewalk.server.engine.cache_view import SequenceView, stored_as
from ropewalk.server.scheduling.kept import Asked, Kept, KeptSequences


@dataclass(frozen=True, slots=True)
class KeptDetails:
    """A kept sequence. `sums`: checksums of its blocks as they are now; none if not asked for."""

    kept: Kept
    stored: SequenceView
    block_size: int
    sums: tuple[str, ...]
    expires_in: float  # seconds


@dataclass(frozen=True, slots=True)
class Operated:
    """What an operation did. `changed`: blocks of `after` that hold other bytes than the blocks
    that they come from did before."""

    before: KeptDetails
    after: KeptDetails
    predicted: OpReport
    report: OpReport
    changed: tuple[int, ...]
    seconds: float


class KeptCache:
    """`sequences` as their clients see them."""

    def __init__(
        self,
        manager: CacheManager,
        sequences: KeptSequences,
        ledger: Ledger,
        operated: Callable[[OpReport], object] = lambda report: None,
    ) -> None:
        """operated: is told of every operation."""
        self.sequences = sequences
        self._operated = operated
        self._manager = manager
        self._ledger = ledger

    def view(self, id_: str, client: str) -> KeptDetails:
        """Raises SequenceNotFound and SequenceBusy."""
        return self._seen(self.sequences.get(id_, client))

    def views(self, client: str) -> list[KeptDetails]:
        """Those of one client, without checksums: to take them reads all that a block holds."""
        kept = (each for each in self.sequences.all() if each.client == client)
        return [self._seen(each, summed=False) for each in kept]

    def stored(self, id_: str, client: str) -> int:
        """How many of its tokens are. Raises SequenceNotFound and SequenceBusy."""
        return self._manager.computed(self.sequences.get(id_, client).id)

    def drop(self, id_: str, client: str) -> None:
        """Raises SequenceNotFound and SequenceBusy."""
        self.sequences.drop(self.sequences.get(id_, client).id)

    def apply(self, id_: str, client: str, asked: Asked) -> Operated:
        """Raises ImpossibleOperation with the reason, SequenceNotFound, QueueFull, InvalidField."""
        moves = asked.op is Op.MOVE_SPAN
        source = self.view(id_, client)
        before = self.view(asked.onto, client) if moves else source
        size = self._manager.block_size
        span = slice(asked.first // size, (asked.first + asked.count) // size)
        origins = [*before.sums]
        if moves:
            origins += source.sums[span]
        elif asked.op in (Op.EVICT_KEEP, Op.EVICT_RENUMBER):
            del origins[span]
        began = time.perf_counter()
        happened = self.sequences.apply(source.kept, asked)
        seconds = time.perf_counter() - began
        self._operated(happened.report)
        after = self._seen(happened.after)
        return Operated(
            before,
            after,
            happened.predicted,
            happened.report,
            changed_blocks(origins, after),
            seconds,
        )

    def _seen(self, kept: Kept, *, summed: bool = True) -> KeptDetails:
        stored = stored_as(self._manager, kept.id)
        sums = self._ledger.sums(stored.blocks) if summed else ()
        size = self._manager.block_size
        return KeptDetails(kept, stored, size, tuple(sums), self.sequences.expires_in(kept))


def changed_blocks(origins: Sequence[str], after: KeptDetails) -> tuple[int, ...]:
    """Blocks of `after` that hold other bytes than those with these checksums, in order, did."""
    pairs = zip(after.stored.blocks, after.sums, origins, strict=False)
    return tuple(block for block, now, then in pairs if now != then)
