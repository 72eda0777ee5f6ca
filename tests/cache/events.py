"""Short constructors of block events."""

from ropewalk.cache.types import BlockEvent, EventKind


def filled(block: int, seq: str) -> BlockEvent:
    return BlockEvent(EventKind.FILLED, block, seq)


def reused(block: int, seq: str) -> BlockEvent:
    return BlockEvent(EventKind.REUSED, block, seq)


def released(block: int, seq: str, base: int) -> BlockEvent:
    return BlockEvent(EventKind.RELEASED, block, seq, base)


def taken(block: int, seq: str) -> BlockEvent:
    return BlockEvent(EventKind.TAKEN, block, seq)
