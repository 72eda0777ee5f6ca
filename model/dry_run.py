"""Operations tried on a separate cache: dry runs without memory, and timed ones."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.types import Audit, Evict, Fork, Move, Op, Operation, Truncate
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import PositionalEncoding

SEQUENCE, OTHER = "sequence", "other"  # names in a trial's cache
MEASURED = 64  # blocks that a timed operation moves, shares or drops
REPETITIONS = 5
META = torch.device("meta")


class Trial:
    """A cache that holds only sequences of the given lengths.

    On torch's meta device it takes no memory, and dry runs give the same counts. `spare`: blocks
    in addition to those of the sequences.
    """

    def __init__(
        self,
        shape: ModelConfig,
        lengths: Mapping[str, int],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = META,
        spare: int = 0,
        gates: int = 0,
    ) -> None:
        # Block 0 is reserved, and a pool needs at least one other.
        blocks = 2 + spare + sum(-(-length // block_size) for length in lengths.values())
        self._layers = shape.num_layers
        self.manager = CacheManager(blocks, block_size, prefix_sharing=False)
        self.kv = KVCache(
            shape, blocks=blocks, block_size=block_size, dtype=dtype, device=device, gates=gates
        )
        for name, length in lengths.items():
            self.store(name, length)

    def store(self, name: str, length: int) -> None:
        """Store a new sequence of `length` tokens."""
        tokens = range(length)  # the values do not matter: no tokens are compared here
        self.manager.reserve(name, tokens, length)
        self.manager.commit(name, tokens, length)

    def operations(self, encoding: PositionalEncoding) -> Operations:
        """Operations on this cache under the rules of that encoding."""
        rules = [encoding.for_layer(layer) for layer in range(self._layers)]
        return Operations(self.manager, self.kv, rules, Ledger(self.kv, Audit.OFF))


@dataclass(frozen=True, slots=True)
class Cost:
    """An operation's cost per 1,000 tokens moved, shared, dropped or appended.

    `bytes`: stored entries read and written, not counting a new token's own. Where it is 0,
    `seconds` is bookkeeping alone.
    """

    seconds: float
    bytes: int


class TimedTrial:
    """Really runs operations, on a cache of sufficient size that is freed with this object."""

    def __init__(
        self, shape: ModelConfig, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size = block_size
        self._device = device
        self._trial = Trial(
            shape, {}, block_size=block_size, dtype=dtype, device=device, spare=2 * MEASURED + 3
        )
        for part in self._trial.kv.whole:
            part.zero_()  # touches the memory, as a running server has

    def cost(self, encoding: PositionalEncoding, op: Op) -> Cost:
        """The median of a few repetitions after a warm-up run. Raises Unsupported."""
        operations = self._trial.operations(encoding)
        taken = [self._run(operations, op) for _ in range(REPETITIONS + 1)][1:]
        thousand = 1000 / (MEASURED * self._size)
        seconds = median(seconds for seconds, _ in taken) * thousand
        return Cost(seconds, round(taken[0][1] * thousand))

    def _run(self, operations: Operations, op: Op) -> tuple[float, int]:
        """Seconds taken and bytes moved."""
        self._trial.store(SEQUENCE, (MEASURED + 2) * self._size)
        self._trial.store(OTHER, self._size)
        self._wait()
        began = time.perf_counter()
        moved = (
            self._append() if op is Op.APPEND else operations.apply(self._example(op)).bytes_moved
        )
        self._wait()
        took = time.perf_counter() - began
        for name in tuple(self._trial.manager.sequences):
            self._trial.manager.release(name)
        self._trial.manager.drain_events()
        return took, moved

    def _append(self) -> int:
        """Append one token at a time, as a running request does; stored entries stay untouched."""
        manager = self._trial.manager
        tokens = range((1 + MEASURED) * self._size)
        for length in range(self._size + 1, len(tokens) + 1):
            manager.reserve(OTHER, tokens, length)
            manager.commit(OTHER, tokens, length)
        return 0

    def _example(self, op: Op) -> Operation:
        """An operation that moves, shares or drops MEASURED whole blocks."""
        match op:
            case Op.FORK:
                return Fork(SEQUENCE, "child", MEASURED * self._size)
            case Op.TRUNCATE:
                return Truncate(SEQUENCE, 2 * self._size)
            case Op.MOVE_SPAN:
                return Move(SEQUENCE, 2, MEASURED, OTHER)
        return Evict(SEQUENCE, 1, 1, renumber=op is Op.EVICT_RENUMBER)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
