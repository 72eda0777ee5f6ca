"""An independent check that a model's weights do not change in memory: checksums, taken once.

The weights are divided into portions; `verify` looks at some of them in turn.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress, cycle, islice

import torch
from torch import Tensor

from ropewalk.cache.ledger import FoldSums, fold_sums, multipliers

STEPS = 1024  # at most, of one portion each, until a change anywhere has been found
# Bytes that share a checksum. Elsewhere than on a CPU few launches count more than a small table.
CHUNK, CHUNK_ELSEWHERE = 64 << 10, 1 << 20
# Starting a check takes as long as summing so many bytes, so a tensor counts as so many more.
START = 64 << 10
# Portions verified at once: after a step, torch's code has left the CPU's caches and takes a while,
# and off the CPU the result has to be waited for.
TOGETHER, TOGETHER_ELSEWHERE = 4, 64
PORTIONS = STEPS - TOGETHER_ELSEWHERE  # at most


@dataclass(frozen=True, slots=True)
class Changed:
    """Bytes first .. last of a tensor are not what they were."""

    tensor: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A tensor's chunks, or the rest that is shorter than one, and their checksums."""

    tensor: str
    first: int  # byte
    size: int  # bytes of a chunk
    stored: Tensor  # integers [1, chunks, integers]
    numbers: Tensor  # of the chunks
    multipliers: Tensor
    seals: Tensor  # [chunks, 1]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Chunks start .. stop - 1."""

    sealed: _Sealed
    start: int
    stop: int


class Seals:
    """Of these tensors, by name, as they are now. Without any, there is nothing to find.

    A sum is as in cache/ledger.py's Checksums: any change within eight bytes changes it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sums: FoldSums = fold_sums) -> None:
        self._sums = sums
        self._device = next((each.device for each in tensors.values()), torch.device("cpu"))
        on_cpu = self._device.type == "cpu"
        self._chunk = CHUNK if on_cpu else CHUNK_ELSEWHERE
        self._together = TOGETHER if on_cpu else TOGETHER_ELSEWHERE
        self._multipliers = {
            device: multipliers(self._chunk // 8, device)
            for device in {each.device for each in tensors.values()}
        }
        self._owed = 0  # portions that `verify` was asked for and has yet to look at
        self._portions = list(self._divided(tensors))
        self._next = cycle(self._portions)

    @property
    def portions(self) -> int:
        """Once so many have been verified, all have."""
        return len(self._portions)

    def verify(self, count: int = 1) -> tuple[int, tuple[Changed, ...]]:
        """Look at the next `count` portions: how many bytes that were, and what has changed.

        Nothing is done until several portions are due.
        """
        self._owed += min(count, self.portions)
        if self._owed < min(self._together, self.portions):
            return 0, ()
        due = _joined(each for portion in islice(self._next, self._owed) for each in portion)
        self._owed = 0
        if not due:
            return 0, ()
        seals = torch.cat([each.sealed.seals[each.start : each.stop] for each in due])
        sums = torch.cat([self._sums_of(each) for each in due])
        faults: list[Changed] = []
        if not torch.equal(sums, seals):
            changed = (sums != seals)[:, 0].tolist()
            chunks = [(each.sealed, at) for each in due for at in range(each.start, each.stop)]
            faults += (_fault(*found) for found in compress(chunks, changed))
        return sum((each.stop - each.start) * each.sealed.size for each in due), tuple(faults)

    def _divided(self, tensors: Mapping[str, Tensor]) -> Iterator[list[_Stretch]]:
        """Portions that take about equally long, PORTIONS or fewer."""
        held = {name: stored for name, each in tensors.items() if len(stored := _bytes(each))}
        share = max(2 * START, -(-sum(START + len(each) for each in held.values()) // PORTIONS))
        portion: list[_Stretch] = []
        room = share
        for name, stored in held.items():
            room -= START
            for sealed in self._sealed(name, stored):
                start = 0
                while start < len(sealed.seals):
                    stop = min(start + max(1, room // sealed.size), len(sealed.seals))
                    portion.append(_Stretch(sealed, start, stop))
                    room -= (stop - start) * sealed.size
                    start = stop
                    if room <= 0:
                        yield portion
                        portion, room = [], share
        if portion:
            yield portion

    def _sealed(self, name: str, stored: Tensor) -> Iterator[_Sealed]:
        """With all checksums at once, as starting takes as long as summing a few of them."""
        whole = len(stored) // self._chunk
        for first, size, count in (
            (0, self._chunk, whole),
            (whole * self._chunk, len(stored) % self._chunk, 1),
        ):
            if size and count:
                chunks = _integers(stored[first : first + count * size].view(1, count, size))
                numbers = torch.arange(count, device=stored.device)
                factors = self._multipliers[stored.device][: -(-size // 8)]
                sums = self._sums(chunks, numbers, factors).to(self._device)
                yield _Sealed(name, first, size, chunks, numbers, factors, sums)

    def _sums_of(self, stretch: _Stretch) -> Tensor:
        of, some = stretch.sealed, slice(stretch.start, stretch.stop)
        return self._sums(of.stored, of.numbers[some], of.multipliers).to(self._device)


def _joined(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Those that lie one after another, as one: each takes several launches on a GPU."""
    found: list[_Stretch] = []
    for each in stretches:
        if found and found[-1].sealed is each.sealed and found[-1].stop == each.start:
            found[-1] = replace(found[-1], stop=each.stop)
        else:
            found.append(each)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """Where it lies in memory, as uint8 [bytes]; with what lies between, unless contiguous."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.detach().as_strided((extent,), (1,)).view(torch.uint8)


def _integers(chunks: Tensor) -> Tensor:
    """uint8 [1, chunks, bytes] as int64 where that fits: off the CPU it is several times faster."""
    misfits = chunks.shape[2] % 8, chunks.storage_offset() % 8, chunks.data_ptr() % 8
    return chunks if any(misfits) else chunks.view(torch.int64)


def _fault(sealed: _Sealed, chunk: int) -> Changed:
    first = sealed.first + chunk * sealed.size
    return Changed(sealed.tensor, first, first + sealed.size - 1)
