"""An independent check that a model's weights do not change in memory: checksums, taken once.

The weights are divided into portions; `verify` looks at some of them in turn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
class _Stretch:
    """Some chunks of a tensor that lie one after another, and their checksums."""

    tensor: str
    first: int  # byte
    stored: Tensor  # uint8 [1, chunks, bytes]
    index: Tensor  # of the chunks
    multipliers: Tensor
    seals: Tensor  # [chunks, 1]


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
        due = [each for portion in islice(self._next, self._owed) for each in portion]
        self._owed = 0
        if not due:
            return 0, ()
        seals = torch.cat([each.seals for each in due])
        sums = torch.cat(
            [self._sums(each.stored, each.index, each.multipliers).to(self._device) for each in due]
        )
        faults: list[Changed] = []
        if not torch.equal(sums, seals):
            changed = (sums != seals)[:, 0].tolist()
            chunks = [(each, chunk) for each in due for chunk in range(len(each.seals))]
            faults += (_fault(*found) for found in compress(chunks, changed))
        return sum(each.stored.numel() for each in due), tuple(faults)

    def _divided(self, tensors: Mapping[str, Tensor]) -> Iterator[list[_Stretch]]:
        """Portions that take about equally long, PORTIONS or fewer."""
        held = {name: stored for name, each in tensors.items() if len(stored := _bytes(each))}
        share = max(2 * START, -(-sum(START + len(each) for each in held.values()) // PORTIONS))
        portion: list[_Stretch] = []
        room = share
        for name, stored in held.items():
            room -= START
            for first, chunk, seals in self._sealed(stored):
                done = 0
                while done < len(seals):
                    count = min(len(seals) - done, max(1, room // chunk))
                    start = first + done * chunk
                    chunks = stored[start : start + count * chunk].view(1, count, chunk)
                    index = torch.arange(count, device=stored.device)
                    factors = self._factors(stored.device, chunk)
                    sealed = seals[done : done + count]
                    portion.append(_Stretch(name, start, chunks, index, factors, sealed))
                    done += count
                    room -= count * chunk
                    if room <= 0:
                        yield portion
                        portion, room = [], share
        if portion:
            yield portion

    def _sealed(self, stored: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Where a tensor's chunks begin, their size, and all their checksums: at once, since
        starting takes as long as summing a few of them."""
        whole = len(stored) // self._chunk
        for first, chunk, count in (
            (0, self._chunk, whole),
            (whole * self._chunk, len(stored) % self._chunk, 1),
        ):
            if chunk and count:
                chunks = stored[first : first + count * chunk].view(1, count, chunk)
                index = torch.arange(count, device=stored.device)
                sums = self._sums(chunks, index, self._factors(stored.device, chunk))
                yield first, chunk, sums.to(self._device)

    def _factors(self, device: torch.device, chunk: int) -> Tensor:
        return self._multipliers[device][: -(-chunk // 8)]


def _bytes(tensor: Tensor) -> Tensor:
    """Where it lies in memory, as uint8 [bytes]; with what lies between, unless contiguous."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.detach().as_strided((extent,), (1,)).view(torch.uint8)


def _fault(stretch: _Stretch, chunk: int) -> Changed:
    size = stretch.stored.shape[2]
    first = stretch.first + chunk * size
    return Changed(stretch.tensor, first, first + size - 1)
