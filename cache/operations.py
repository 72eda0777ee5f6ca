"""Operations on cached sequences: fork, truncate, evict and move, with what each one costs.

Block bookkeeping is cache/rearranging.py's job; only entries that an encoding ties to a position
are rewritten here. Appending is not among these operations: it is `reserve`, `write` and `commit`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache, tensor_on
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.rearranging import Copy
from ropewalk.cache.types import (
    Capability,
    Evict,
    Fork,
    Move,
    NoRoom,
    Op,
    Operation,
    OpReport,
    Truncate,
    Unsupported,
)

REWRITES = (Capability.REWRITE, Capability.APPROXIMATE)
HARDEST_FIRST = (Capability.IMPOSSIBLE, Capability.APPROXIMATE, Capability.REWRITE, Capability.FREE)
_Item = TypeVar("_Item")

BLOCKS_AT_ONCE = 64  # bounds the extra memory that a long shift needs


class KeyRules(Protocol):
    """What one layer's stored keys require; every PositionalEncoding implements it."""

    WHY_FIXED: ClassVar[str]

    def capability(self, op: Op, dtype: torch.dtype) -> Capability: ...

    def shift(self, keys: Tensor, delta: int) -> Tensor: ...


class _Moving(NamedTuple):
    """A block whose keys must move by `delta` positions; `slots` of its slots are filled."""

    block: int
    delta: int
    slots: int


class Operations:
    """Applies operations to one model's cache. `rules`: one per layer.

    `ledger` verifies blocks before an operation touches them, and seals the result.
    """

    def __init__(
        self, manager: CacheManager, kv: KVCache, rules: Sequence[KeyRules], ledger: Ledger
    ) -> None:
        self._manager = manager
        self._kv = kv
        self._rules = rules
        self._ledger = ledger

    def capability(self, op: Op) -> Capability:
        """The most restrictive capability of any layer."""
        found = {rules.capability(op, self._kv.dtype) for rules in self._rules}
        return next(each for each in HARDEST_FIRST if each in found)

    def why_not(self, op: Op) -> str | None:
        """Why the operation is impossible; None when it is possible."""
        if self.capability(op) is not Capability.IMPOSSIBLE:
            return None
        return next(rules.WHY_FIXED for rules in self._rules if rules.WHY_FIXED)

    def dry_run(self, operation: Operation) -> OpReport:
        """What `apply` would report, changing nothing. Raises Unsupported like `apply`."""
        reason = self.why_not(operation.op)
        if reason is not None:
            raise Unsupported(f"{operation.op.value} is impossible here: {reason}")
        return self._report(operation, self._moving(operation))

    def apply(self, operation: Operation) -> OpReport:
        """Do it. Raises Unsupported, NoRoom, and ValueError for blocks that do not exist."""
        report = self.dry_run(operation)
        moving = self._moving(operation)
        moved = [each.block for each in moving]
        self._ledger.verify(moved, operation.changed)
        copies = self._rearrange(operation, rewrite=bool(moving))
        if copies is None:
            raise NoRoom(f"{operation.op.value} needs more blocks than are free")
        # A copy of a corrupted block would be just as wrong, and would be sealed as correct.
        copied = {copy.source for copy in copies}.difference(moved)
        self._ledger.verify(tuple(copied), operation.changed)
        # Before any write: verify released blocks and drop the seals of blocks taken.
        self._ledger.observe(self._manager.drain_events())
        self._copy(copies)
        placed = dict(copies)
        moving = [each._replace(block=placed.get(each.block, each.block)) for each in moving]
        report = replace(report, rewritten=self._shift(operation.op, moving))
        self._ledger.seal([each.block for each in moving if each.slots == self._kv.block_size])
        return report

    def _moving(self, operation: Operation) -> list[_Moving]:
        """Blocks whose keys the operation rewrites; none where its capability is free."""
        if self.capability(operation.op) not in REWRITES:
            return []
        size = self._kv.block_size
        if isinstance(operation, Evict):
            table = self._manager.table(operation.seq)
            computed = self._manager.computed(operation.seq)
            first, delta = operation.first + operation.count, -operation.count * size
            return [
                _Moving(table.blocks[index], delta, min(size, computed - index * size))
                for index in range(first, -(-computed // size))
            ]
        assert isinstance(operation, Move), "the other operations are free for every encoding"
        source, target = (self._manager.table(seq) for seq in (operation.source, operation.target))
        end = target.bases[-1] + size if target.bases else 0
        span = range(operation.first, operation.first + operation.count)
        deltas = [end + n * size - source.bases[index] for n, index in enumerate(span)]
        if not any(deltas):
            return []  # blocks at an unchanged offset are shared as they are
        return [
            _Moving(source.blocks[index], delta, size)
            for index, delta in zip(span, deltas, strict=True)
        ]

    def _report(self, operation: Operation, moving: Sequence[_Moving]) -> OpReport:
        rotating = sum(
            rules.capability(operation.op, self._kv.dtype) in REWRITES for rules in self._rules
        )
        rewritten = (
            rotating * self._kv.num_kv_heads * sum(each.slots for each in moving if each.delta)
        )
        copied = self._copied_slots(operation, moving)  # tokens
        return OpReport(
            operation.op,
            self.capability(operation.op),
            copied=copied * self._kv.entries_per_token,
            rewritten=rewritten,
            should_change=rewritten,
            bytes_moved=2
            * (copied * self._kv.bytes_per_token + rewritten * self._kv.bytes_per_entry),
        )

    def _copied_slots(self, operation: Operation, moving: Sequence[_Moving]) -> int:
        size = self._kv.block_size
        match operation:
            case Fork(_, _, length):
                return length % size
            case Truncate(seq, length):
                rest = length % size
                return rest if rest and self._manager.shared(seq, length // size) else 0
            case Evict(seq, first, count):
                later = range(first + count, first + count + len(moving))
                return sum(
                    each.slots
                    for each, index in zip(moving, later, strict=True)
                    if self._manager.shared(seq, index)
                )
            case Move():
                return sum(each.slots for each in moving)

    def _rearrange(self, operation: Operation, *, rewrite: bool) -> list[Copy] | None:
        rearranger = self._manager.rearranger
        match operation:
            case Fork(seq, child, length):
                return rearranger.fork(seq, child, length)
            case Truncate(seq, length):
                return rearranger.truncate(seq, length)
            case Evict(seq, first, count, renumber):
                return rearranger.evict(seq, first, count, renumber=renumber, rewrite=rewrite)
            case Move(source, first, count, target):
                return rearranger.move(source, first, count, target, rewrite=rewrite)

    def _copy(self, copies: Sequence[Copy]) -> None:
        for some in _batched(copies):
            sources, targets = (
                tensor_on(self._kv.device, each) for each in zip(*some, strict=True)
            )
            for layer in range(self._kv.num_layers):
                for part in self._kv.layer(layer):
                    part[targets] = part[sources]

    def _shift(self, op: Op, moving: Sequence[_Moving]) -> int:
        """Rewrite keys in the layers whose keys carry their position, one distance at a time.

        Returns how many keys were rewritten, counted here rather than predicted.
        """
        rewritten = 0
        for delta in dict.fromkeys(each.delta for each in moving if each.delta):
            alike = [each for each in moving if each.delta == delta]
            for some in _batched(alike):
                blocks = tensor_on(self._kv.device, [each.block for each in some])
                keys = self._kv.num_kv_heads * sum(each.slots for each in some)
                for layer, rules in enumerate(self._rules):
                    if rules.capability(op, self._kv.dtype) in REWRITES:
                        self._kv.layer(layer).change_keys(blocks, partial(rules.shift, delta=delta))
                        rewritten += keys
        return rewritten


def _batched(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), BLOCKS_AT_ONCE):
        yield items[start : start + BLOCKS_AT_ONCE]
