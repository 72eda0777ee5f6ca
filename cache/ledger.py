"""An independent check that cached entries do not change: a checksum of every full block.

A block is *sealed* when its last slot has been written, and *verified* against its seal when it
is shared, when it is released, and in turn by `sample`. Nothing here relies on what the rest of
the program claims to have done: only the stored bytes count.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from hashlib import blake2b
from itertools import compress, islice
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache, tensor_on
from ropewalk.cache.types import Audit, BlockEvent, EventKind

# Blocks verified per batch by `sample`: starting a check costs more than checking one block, and
# off the CPU the result has to be waited for, along with all the work queued on the device.
SAMPLED_TOGETHER, SAMPLED_TOGETHER_ELSEWHERE = 8, 64
FOLD = 15  # shifts bit 31, often a sign, into the middle, away from the sign of the low half
# Bytes of blocks copied at once, so that they stay in the CPU's cache while they are summed, but
# this many blocks; elsewhere so many that launching the kernels takes no longer than running them.
BATCH_BYTES, BATCH_LEAST, BATCH_ELSEWHERE = 1 << 20, 4, 64

# (stored [layers, blocks, integers], blocks [N], multipliers) → sums [N, layers] int64.
FoldSums = Callable[[Tensor, Tensor, Tensor], Tensor]


class Part(StrEnum):
    """Scales count as part of the keys or values that they belong to, gates as part of keys."""

    KEYS = "keys"
    VALUES = "values"


class Place(NamedTuple):
    """A layer and part of a block."""

    layer: int
    part: Part


@dataclass(frozen=True, slots=True)
class Fault:
    """A sealed block whose bytes have changed.

    `sequences` are those that shared it, released it or were about to copy it when it was
    verified; `base` is the position of the block's first slot if one of them released it. The
    manager knows the block's other holders.
    """

    block: int
    places: tuple[Place, ...]
    sequences: tuple[str, ...] = ()
    base: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What a ledger has done since the last `drain`."""

    sealed: int = 0  # blocks
    verified: int = 0  # blocks
    mutated: int = 0  # entries in changed layers and parts, counting all of the block's
    faults: tuple[Fault, ...] = ()

    def __add__(self, other: "LedgerCounts") -> "LedgerCounts":
        return LedgerCounts(
            self.sealed + other.sealed,
            self.verified + other.verified,
            self.mutated + other.mutated,
            self.faults + other.faults,
        )


_NOTHING = LedgerCounts()


def fold_sums(stored: Tensor, blocks: Tensor, multipliers: Tensor) -> Tensor:
    """The sums that Checksums defines, on any device. For the CPU, model/kernels is faster."""
    together = BATCH_ELSEWHERE
    if stored.device.type == "cpu":
        together = max(BATCH_LEAST, BATCH_BYTES // stored[:, 0].nbytes)
    batches = torch.split(blocks, together)
    return torch.cat([_sums_of_some(stored, some, multipliers) for some in batches])


def _sums_of_some(stored: Tensor, blocks: Tensor, multipliers: Tensor) -> Tensor:
    words = _words(stored.index_select(1, blocks))
    halves = words.view(torch.int32)
    halves[..., 0::2] ^= halves[..., 1::2] >> FOLD
    words *= multipliers
    return words.sum(-1).T


def multipliers(count: int, device: torch.device) -> Tensor:
    """[count] int64: odd, otherwise random, and always the same."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    random = torch.randint(limits.min, limits.max, (count,), generator=generator)
    return (random | 1).to(device)


class Checksums:
    """64 bits for each block, layer and part: sum of multiplier[i] · fold(word[i]) modulo 2^64.

    The words are the block's bytes, eight at a time, zero-padded to a whole word; where keys or
    values have scales, then those of the scales, and
    beside keys those of gates, with their own multipliers. `fold` XORs the low
    half of a word with its shifted high half. It is its own inverse, so different words stay
    different. A multiplier is odd and so invertible modulo 2^64. Hence any change within one
    word, even of a single bit, changes the sum, and changes in several words cancel only if the
    multipliers, random but fixed, happen to make them. Without the fold, flips of the highest
    bits of any two words would cancel, so a negated block would go unnoticed.

    Computed on the cache's device; guards against bugs and faulty memory, not against forgery.
    """

    def __init__(self, kv: KVCache, sums: FoldSums = fold_sums) -> None:
        # For each part, its tensors as [layers, blocks, integers]. Keys may have one more.
        self._parts = [[_integers(tensor) for tensor in part] for part in kv.whole.parts]
        self._sums = sums
        self._device = kv.device
        words = [-(-each.shape[2] * each.element_size() // 8) for each in self._parts[0]]
        self._multipliers = torch.split(multipliers(sum(words), kv.device), words)

    def of(self, blocks: Sequence[int]) -> Tensor:
        """[blocks, parts, layers] int64, in the order of a PagedKV's parts."""
        index = tensor_on(self._device, blocks)
        return torch.stack([self._of_part(part, index) for part in self._parts], dim=1)

    def _of_part(self, part: Sequence[Tensor], index: Tensor) -> Tensor:
        """[blocks, layers]."""
        return reduce(
            torch.add,
            (
                self._sums(tensor, index, multipliers)
                for tensor, multipliers in zip(part, self._multipliers, strict=False)
            ),
        )


class Ledger:
    """Seals and verifies the blocks of `kv`. Says nothing about blocks that were never full.

    Call `observe` with the manager's events before anything is written to the cache again: until
    then a released block still has its bytes. `drain` returns the findings.
    """

    def __init__(self, kv: KVCache, mode: Audit, sums: FoldSums = fold_sums) -> None:
        self.mode = mode
        self._entries = kv.block_size * kv.num_kv_heads  # of one layer and part of a block
        # Least recently sealed or verified first.
        self._sealed: OrderedDict[int, None] = OrderedDict()
        self._checksums = Checksums(kv, sums)
        self._together = SAMPLED_TOGETHER if kv.device.type == "cpu" else SAMPLED_TOGETHER_ELSEWHERE
        self._device = kv.device
        self._seals = torch.zeros(kv.blocks, 2, kv.num_layers, dtype=torch.int64, device=kv.device)
        self._counts = _NOTHING
        self._owed = 0  # blocks that `sample` has yet to verify

    @property
    def sealed(self) -> frozenset[int]:
        """Blocks that have a seal."""
        return frozenset(self._sealed)

    def observe(self, events: Iterable[BlockEvent]) -> None:
        """Seal filled blocks and verify those shared or released, in the events' order."""
        if self.mode is Audit.OFF:
            return
        filled: dict[int, None] = {}
        void: set[int] = set()
        touched: dict[int, list[BlockEvent]] = {}
        for event in events:
            if event.kind is EventKind.FILLED:
                filled[event.block] = None
                touched.pop(event.block, None)  # its seal was for its previous content
            elif event.kind is EventKind.TAKEN:
                void.add(event.block)
                filled.pop(event.block, None)
            elif event.block not in void and event.block not in filled:
                touched.setdefault(event.block, []).append(event)
        sealed = [block for block in touched if block in self._sealed]
        summed = [*sealed, *filled]
        if not summed:
            self.forget(void)
            return
        # At once, since starting takes about as long as one block.
        sums = self._checksums.of(summed)
        self._compare({block: touched[block] for block in sealed}, sums[: len(sealed)])
        self.forget(void)
        self._seal(list(filled), sums[len(sealed) :])

    def sample(self) -> None:
        """Verify the least recently seen sealed blocks: one per call on average, in batches.

        In full mode, all of them in each call.
        """
        if self.mode is Audit.FULL:
            self.verify(tuple(self._sealed))
            return
        self._owed += 1
        if self._owed == self._together:
            self.verify(tuple(islice(self._sealed, self._owed)))
            self._owed = 0

    def verify(self, blocks: Iterable[int], seq: str | None = None) -> None:
        """Compare the sealed ones among `blocks` with their seals; `seq` is about to use them.

        A faulty block loses its seal, so that `drain` reports it once.
        """
        sealed = [block for block in dict.fromkeys(blocks) if block in self._sealed]
        if sealed:
            sequences = () if seq is None else (seq,)
            self._compare(dict.fromkeys(sealed, ()), self._checksums.of(sealed), sequences)

    def no_sums(self, count: int) -> Tensor:
        """Where the sums of so many blocks can be kept outside."""
        return torch.zeros(count, *self._seals.shape[1:], dtype=torch.int64, device=self._device)

    def leaving(self, blocks: Sequence[int]) -> tuple[Tensor, list[bool]]:
        """The sums of blocks that are about to be copied elsewhere, and whether each is sealed.

        A seal says what its block should hold, so a copy of anything else will not pass `arrived`.
        """
        sealed = [block in self._sealed for block in blocks]
        sums = self._seals[tensor_on(self._device, blocks)]
        others = [block for block in blocks if block not in self._sealed]
        if others and self.mode is not Audit.OFF:
            sums[self._where([not each for each in sealed])] = self._checksums.of(others)
        return sums, sealed

    def arrived(self, blocks: Sequence[int], sums: Tensor, full: Sequence[bool]) -> list[bool]:
        """Verify blocks that were copied back, and seal those that are full and intact.

        sums: those that they left with. Returns which are intact.
        """
        self.forget(blocks)
        if self.mode is Audit.OFF:
            return [True] * len(blocks)
        changed = (self._checksums.of(blocks) != sums).flatten(1).any(1).tolist()
        intact = [not each for each in changed]
        chosen = [each and whole for each, whole in zip(intact, full, strict=True)]
        if any(chosen):
            sealed = list(compress(blocks, chosen))
            self._seals[tensor_on(self._device, sealed)] = sums[self._where(chosen)]
            self._seen(sealed)
        self._counts += LedgerCounts(verified=len(blocks))
        return intact

    def _where(self, chosen: Sequence[bool]) -> Tensor:
        return tensor_on(self._device, [at for at, each in enumerate(chosen) if each])

    def seal(self, blocks: Iterable[int]) -> None:
        """Take the present bytes of `blocks` as correct, whatever was known of them before."""
        chosen = list(dict.fromkeys(blocks))
        if self.mode is not Audit.OFF and chosen:
            self._seal(chosen, self._checksums.of(chosen))

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the seals of `blocks`, which are to be overwritten or are out of use."""
        for block in blocks:
            self._sealed.pop(block, None)

    def sums(self, blocks: Sequence[int]) -> list[str]:
        """A checksum of each block as it is now, full or not, whether or not anything is sealed."""
        if not blocks:
            return []
        folded = self._checksums.of(blocks).cpu().numpy()
        return [blake2b(each.tobytes(), digest_size=8).hexdigest() for each in folded]

    def drain(self) -> LedgerCounts:
        """What was done and found since the last call."""
        counts, self._counts = self._counts, _NOTHING
        return counts

    def _seal(self, blocks: Sequence[int], sums: Tensor) -> None:
        if blocks:
            self._seals[tensor_on(self._device, blocks)] = sums
            self._seen(blocks)
            self._counts += LedgerCounts(sealed=len(blocks))

    def _compare(
        self,
        touched: Mapping[int, Sequence[BlockEvent]],
        sums: Tensor,
        sequences: tuple[str, ...] = (),
    ) -> None:
        """Compare the sums of sealed blocks with their seals.

        `touched` maps the blocks to the events that call for their verification.
        """
        blocks = list(touched)
        if not blocks:
            return
        changed = sums != self._seals[tensor_on(self._device, blocks)]
        self._seen(blocks)
        # Only one bool is copied to the host, unless something is wrong.
        faults = []
        if changed.any():
            for index, block in enumerate(blocks):
                places = _places(changed[index])
                if places:
                    faults.append(_fault(block, places, touched[block], sequences))
        self.forget(fault.block for fault in faults)
        mutated = self._entries * sum(len(fault.places) for fault in faults)
        self._counts += LedgerCounts(0, len(blocks), mutated, tuple(faults))

    def _seen(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._sealed[block] = None
            self._sealed.move_to_end(block)


def _integers(part: Tensor) -> Tensor:
    """[layers, blocks, ...] as [layers, blocks, integers]: the same bytes, as int64 if they fit."""
    flat = part.view(*part.shape[:2], -1)  # a view, as a copy would not follow later writes
    fits = flat.shape[2] * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if fits else torch.uint8)


def _words(integers: Tensor) -> Tensor:
    """[..., integers] as [..., words] of eight bytes."""
    if integers.dtype is torch.int64:
        return integers
    padded = torch.nn.functional.pad(integers, (0, -integers.shape[-1] % 8))
    return padded.view(torch.int64)


def _places(changed: Tensor) -> tuple[Place, ...]:
    """From [parts, layers] bool: by layer, keys first."""
    found = sorted((layer, part) for part, layer in changed.nonzero().tolist())
    return tuple(Place(layer, list(Part)[part]) for layer, part in found)


def _fault(
    block: int, places: tuple[Place, ...], events: Sequence[BlockEvent], sequences: tuple[str, ...]
) -> Fault:
    concerned = tuple(dict.fromkeys((*sequences, *(event.seq for event in events))))
    base = next((event.base for event in events if event.base is not None), None)
    return Fault(block, places, concerned, base)
