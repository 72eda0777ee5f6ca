"""Words for what can be done to a cache, and for what each operation costs. No torch.

An *entry* is one key or value vector of one layer, key/value head and position. *Position error*
is a stored entry against the same one at its correct place; *context error* is a stored entry
against one recomputed without the removed tokens. Capabilities speak of position error alone:
context error is the same for every encoding and would hide what differs between them.
"""

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    APPEND = "append"
    FORK = "fork"  # two sequences go on from one beginning
    TRUNCATE = "truncate"
    EVICT_KEEP = "evict_keep"  # drop a middle span; survivors keep their positions
    EVICT_RENUMBER = "evict_renumber"  # drop a middle span; survivors close the gap
    MOVE_SPAN = "move_span"  # reuse a cached span at another offset


class Capability(StrEnum):
    FREE = "free"  # no stored entry changes
    REWRITE = "rewrite"  # every moved key is rewritten, exactly but for float32's rounding
    APPROXIMATE = "approximate"  # as rewrite, and rounded to half precision each time
    IMPOSSIBLE = "impossible"


class KeyFrame(StrEnum):
    """Which rotation stored keys carry."""

    ABSOLUTE = "absolute"  # that of their position
    RAW = "raw"  # none
    BLOCK = "block"  # that of their offset within the block


class Unsupported(ValueError):
    """An operation that the encoding makes impossible; one sentence that says why."""


@dataclass(frozen=True, slots=True)
class OpReport:
    """What one operation did, or would do. Entries and bytes over all layers."""

    op: Op
    capability: Capability
    written: int = 0  # entries that were stored anew: copied to another block
    rewritten: int = 0  # entries whose stored bytes were replaced by those of another position
    should_change: int = 0  # entries whose bytes are wrong at their new position
    bytes_moved: int = 0  # read and written, both counted

    @property
    def stale(self) -> int:
        """Entries that should have changed and did not."""
        return self.should_change - self.rewritten
