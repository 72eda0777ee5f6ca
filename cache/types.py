"""Terms for what can be done to a cache, and for what each operation costs. No torch.

An *entry* is one key or value vector of one layer, key/value head and position. *Position error*
compares a stored entry with the same entry computed at its correct position; *context error*
compares it with one recomputed without the removed tokens. Capabilities describe position error
only: context error is the same for every encoding and would hide what differs between them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

BLOCK_SIZE = 16  # tokens per block, by default


class Op(StrEnum):
    APPEND = "append"
    FORK = "fork"  # two sequences share a prefix and then diverge
    TRUNCATE = "truncate"
    EVICT_KEEP = "evict_keep"  # drop a middle span; survivors keep their positions
    EVICT_RENUMBER = "evict_renumber"  # drop a middle span; survivors close the gap
    MOVE_SPAN = "move_span"  # reuse a cached span at another offset


class Capability(StrEnum):
    FREE = "free"  # no stored entry changes
    REWRITE = "rewrite"  # every moved key is rewritten, exact up to float32 rounding
    APPROXIMATE = "approximate"  # as rewrite, but rounded to half precision or 8 bits each time
    IMPOSSIBLE = "impossible"


class KeyStorage(StrEnum):
    """Which rotation stored keys carry."""

    ABSOLUTE = "absolute"  # that of the key's position
    RAW = "raw"  # none
    BLOCK = "block"  # that of the key's offset within the block


class EventKind(StrEnum):
    """What happened to a block, for whoever keeps track of its content."""

    FILLED = "filled"  # all of its slots are stored and committed
    REUSED = "reused"  # its content serves another sequence, or is taken up again
    RELEASED = "released"  # a sequence gave it up
    TAKEN = "taken"  # about to be overwritten: what was known of its content is void


@dataclass(frozen=True, slots=True)
class BlockEvent:
    kind: EventKind
    block: int
    seq: str
    base: int | None = None  # of a released block: the position of its first slot in `seq`


class Audit(StrEnum):
    """Which sealed blocks are verified, besides those being shared or released."""

    OFF = "off"  # nothing is sealed or verified at all
    SAMPLE = "sample"  # one per step, in rotation
    FULL = "full"  # all of them, each step


class Unsupported(ValueError):
    """An operation that the encoding makes impossible; the message says why in one sentence."""


class InvariantError(AssertionError):
    """The cache's accounting is inconsistent: a bug of this program, never a bad request."""


class NoRoom(RuntimeError):
    """Too few free blocks for the copies that an operation needs; nothing has changed."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A new sequence `child` begins as the first `length` computed tokens of `seq`."""

    op: ClassVar[Op] = Op.FORK
    seq: str
    child: str
    length: int

    @property
    def changed(self) -> str:
        """The sequence that the operation creates or modifies."""
        return self.child


@dataclass(frozen=True, slots=True)
class Truncate:
    """Forget the tokens of `seq` after the first `length`."""

    op: ClassVar[Op] = Op.TRUNCATE
    seq: str
    length: int

    @property
    def changed(self) -> str:
        return self.seq


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop `count` full blocks of `seq` starting at `first`; with `renumber` close the gap."""

    seq: str
    first: int
    count: int
    renumber: bool

    @property
    def changed(self) -> str:
        return self.seq

    @property
    def op(self) -> Op:
        return Op.EVICT_RENUMBER if self.renumber else Op.EVICT_KEEP


@dataclass(frozen=True, slots=True)
class Move:
    """Append `count` full blocks of `source`, starting at `first`, to `target`."""

    op: ClassVar[Op] = Op.MOVE_SPAN
    source: str
    first: int
    count: int
    target: str

    @property
    def changed(self) -> str:
        return self.target


Operation = Fork | Truncate | Evict | Move


@dataclass(frozen=True, slots=True)
class OpReport:
    """What one operation did, or would do. Entries and bytes over all layers."""

    op: Op
    capability: Capability
    copied: int = 0  # entries stored a second time because their block was shared
    rewritten: int = 0  # keys replaced by the same keys at another position
    should_change: int = 0  # stored entries that are wrong at their new position
    bytes_moved: int = 0  # read and written, both counted

    @property
    def stale(self) -> int:
        """Entries that should have changed and did not."""
        return self.should_change - self.rewritten
