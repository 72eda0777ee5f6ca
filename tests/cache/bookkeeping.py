"""The cache's bookkeeping without its tensors, for tests."""

from collections.abc import Callable

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.rearranging import Copy
from ropewalk.cache.types import Capability, Evict, Fork, Move, NoRoom, Op, OpReport, Truncate


def store(cache: CacheManager, seq: str, tokens, **options) -> int | None:
    """Reserve room for all tokens and commit them."""
    computed = cache.reserve(seq, tokens, len(tokens), **options)
    if computed is not None:
        cache.commit(seq, tokens, len(tokens))
    cache.check()
    return computed


class Bookkeeping:
    """`capability` is that of renumbering; `copied` is called with each copy of a block."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        capability: Capability = Capability.FREE,
        copied: Callable[[Copy], None] = lambda copy: None,
    ) -> None:
        self.manager = manager
        self.renumbering = capability
        self.copied = copied

    def capability(self, op: Op) -> Capability:
        return self.renumbering if op is Op.EVICT_RENUMBER else Capability.FREE

    def why_not(self, op: Op) -> str | None:
        impossible = self.capability(op) is Capability.IMPOSSIBLE
        return "its positions are in its values" if impossible else None

    def dry_run(self, operation):
        return OpReport(operation.op, self.capability(operation.op))

    def apply(self, operation):
        match operation:
            case Truncate(seq, length):
                copies = self.manager.rearranger.truncate(seq, length)
            case Move(source, first, count, target):
                copies = self.manager.rearranger.move(source, first, count, target, rewrite=False)
            case Fork(seq, child, length):
                copies = self.manager.rearranger.fork(seq, child, length)
            case Evict(seq, first, count, renumber):
                rewrite = self.renumbering is not Capability.FREE
                copies = self.manager.rearranger.evict(
                    seq, first, count, renumber=renumber, rewrite=rewrite
                )
        if copies is None:
            raise NoRoom
        for copy in copies:
            self.copied(copy)
        return OpReport(operation.op, self.capability(operation.op), copied=len(copies))
