"""A second place for blocks, in host memory: what is kept goes there before its block is used.

Everything about it is here, so that another place needs `put` and `take` and no more.
"""

from collections.abc import Sequence
from logging import getLogger

import torch

from ropewalk.cache.keeper import Moves
from ropewalk.cache.kv import KVCache, tensor_on
from ropewalk.cache.ledger import Ledger

log = getLogger(__name__)

# Moved in one step at most: about a millisecond, with the checksums.
BYTES_AT_ONCE, BYTES_AT_ONCE_ELSEWHERE = 3 << 19, 24 << 20


class HostMemory:
    """Slots for blocks of `kv`, whose checksums `ledger` takes and verifies.

    On a GPU, blocks are copied by the stream that computes, without waiting for it.
    """

    def __init__(self, kv: KVCache, slots: int, ledger: Ledger) -> None:
        self.slots = slots
        self.moves = Moves()
        self._whole = tuple(kv.whole)
        self._ledger = ledger
        on_cpu = kv.device.type == "cpu"
        bytes_at_once = BYTES_AT_ONCE if on_cpu else BYTES_AT_ONCE_ELSEWHERE
        self.at_once = max(1, bytes_at_once // (kv.bytes_per_token * kv.block_size))
        # Slot by slot, so that one is a few long runs of bytes. On a CPU it is resident once used.
        self._parts = [
            torch.empty(
                (slots, part.shape[0], *part.shape[2:]),
                dtype=part.dtype,
                pin_memory=kv.device.type == "cuda",
            )
            for part in self._whole
        ]
        self._seals = ledger.no_sums(slots)
        self._full: set[int] = set()  # slots whose block was sealed

    def put(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots."""
        sums, sealed = self._ledger.leaving(blocks)
        rows = [slot - 1 for slot in slots]
        self._seals[tensor_on(self._seals.device, rows)] = sums
        for block, row, full in zip(blocks, rows, sealed, strict=True):
            (self._full.add if full else self._full.discard)(row)
            for part, kept in zip(self._whole, self._parts, strict=True):
                kept[row].copy_(part[:, block], non_blocking=True)
        self.moves += Moves(out=len(blocks))

    def take(self, slots: Sequence[int], blocks: Sequence[int]) -> list[bool]:
        """Copy slots into blocks; which of them are what was put there."""
        rows = [slot - 1 for slot in slots]
        for block, row in zip(blocks, rows, strict=True):
            for part, kept in zip(self._whole, self._parts, strict=True):
                part[:, block].copy_(kept[row], non_blocking=True)
        full = [row in self._full for row in rows]
        seals = self._seals[tensor_on(self._seals.device, rows)]
        intact = self._ledger.arrived(blocks, seals, full)
        changed = intact.count(False)
        if changed:
            log.error("%d blocks changed before they came back to the cache", changed)
        self.moves += Moves(back=len(blocks) - changed, changed=changed)
        return intact
