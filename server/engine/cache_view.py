"""What one model's cache holds for which request, as plain data: numbers and ids, never tokens.

Made on the engine thread, which owns the cache; the result is a copy. No torch.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk.cache.keeper import SpillCounts
from ropewalk.cache.manager import BlockCounts, CacheManager, PoolView
from ropewalk.cache.types import Audit
from ropewalk.server.scheduling.kept import Kept
from ropewalk.server.scheduling.request import Limits, Overflow, Request
from ropewalk.server.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SequenceView:
    """Position of a token = base of its block + offset; `computed` tokens are stored."""

    blocks: tuple[int, ...]
    bases: tuple[int, ...]
    computed: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A running request. `source` is the encoder's output for its prompt, if there is one."""

    id: str
    known: int  # tokens, dropped ones included
    dropped: int
    overflow: Overflow
    stored: SequenceView
    source: SequenceView | None


@dataclass(frozen=True, slots=True)
class KeptView:
    id: str
    known: int  # tokens
    stored: SequenceView


@dataclass(frozen=True, slots=True)
class AuditView:
    """Blocks that have a seal now; and sealed, verified and found changed since the start."""

    mode: Audit
    sealed_now: int
    sealed: int
    verified: int
    mutated: int


@dataclass(frozen=True, slots=True)
class CacheView:
    """`shared`: blocks that two or more sequences hold, with the names of the sequences."""

    pool: PoolView
    blocks: BlockCounts
    running: tuple[RequestView, ...]  # oldest first
    kept: tuple[KeptView, ...]  # least recently used first
    waiting: int
    limits: Limits
    shared: Mapping[int, tuple[str, ...]]
    audit: AuditView
    spill: SpillCounts  # what the second place holds
    seconds: float  # of the engine's thread, for this look


def view(manager: CacheManager, scheduler: Scheduler, audit: AuditView) -> CacheView:
    """A snapshot between two steps. Walks every block table."""
    began = time.perf_counter()
    pool = manager.pool()
    return CacheView(
        pool=pool,
        blocks=manager.counts(),
        running=tuple(_request(manager, request) for request in scheduler.running),
        kept=tuple(_kept(manager, kept) for kept in scheduler.kept.all()),
        waiting=len(scheduler.waiting),
        limits=scheduler.limits,
        shared=_shared(manager, pool),
        audit=audit,
        spill=manager.spilled(),
        seconds=time.perf_counter() - began,
    )


def _request(manager: CacheManager, request: Request) -> RequestView:
    return RequestView(
        id=request.id,
        known=len(request.tokens),
        dropped=request.dropped,
        overflow=request.overflow,
        stored=stored_as(manager, request.id),
        source=stored_as(manager, request.encoded) if request.source else None,
    )


def _kept(manager: CacheManager, kept: Kept) -> KeptView:
    return KeptView(kept.id, len(kept.tokens), stored_as(manager, kept.id))


def stored_as(manager: CacheManager, name: str) -> SequenceView:
    """What a sequence of that name has stored."""
    table = manager.table(name)
    return SequenceView(tuple(table.blocks), tuple(table.bases), manager.computed(name))


def _shared(manager: CacheManager, pool: PoolView) -> dict[int, tuple[str, ...]]:
    counts = pool.holders
    holders: dict[int, list[str]] = {}
    for name in manager.sequences:
        for block in manager.table(name).blocks:
            if counts[block] > 1:
                holders.setdefault(block, []).append(name)
    return {block: tuple(names) for block, names in sorted(holders.items())}
