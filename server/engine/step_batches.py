"""Builds each step's batch; while the same requests decode, updates the last one in place."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ropewalk.cache.manager import Table
from ropewalk.server.engine.batch import Sample, StepBatch, build_batch
from ropewalk.server.scheduling.plan import Work


class StepBatches:
    """Builds batches for work on one cache. A batch is valid until the next one is built."""

    def __init__(self, table_of: Callable[[str], Table], block_size: int) -> None:
        self._table_of = table_of
        self._block_size = block_size
        self._decoding: _Decoding | None = None

    def of(self, work: tuple[Work, ...]) -> StepBatch:
        """Like `build_batch`."""
        if self._decoding is not None and self._decoding.advance(work):
            return self._decoding.batch
        batch = build_batch(work, self._table_of, self._block_size)
        decoding = all(
            each.count == 1 and each.samples and each.start >= each.request.context_prompt
            for each in work
        )
        self._decoding = None
        if decoding:
            self._decoding = _Decoding(batch, work, self._table_of, self._block_size)
        return batch


class _Decoding:
    """A batch of one token per request, which is advanced from step to step."""

    def __init__(
        self,
        batch: StepBatch,
        work: tuple[Work, ...],
        table_of: Callable[[str], Table],
        block_size: int,
    ) -> None:
        self.batch = batch
        self._work = work
        self._steps = 0  # since `work`
        self._held = [table_of(each.request.id).blocks for each in work]
        self._table_of = table_of
        self._block_size = block_size
        forward = batch.forward
        self._tokens = forward.tokens.numpy()
        self._positions = forward.positions.numpy()
        self._offsets = forward.offsets.numpy()
        self._slots = forward.slots.numpy()
        self._blocks = forward.block_tables.numpy()
        self._bases = forward.block_bases.numpy()
        # Positions, offsets, slots and context lengths are adjacent: one operation adds to all.
        self._counting = as_strided(self._positions, (4 * len(work),))
        self._until_full = self._first_full()

    def _first_full(self) -> int:
        """Steps until some request begins a block."""
        return self._block_size - int(self._offsets.max())

    def advance(self, work: tuple[Work, ...]) -> bool:
        """Advance to each request's next token. False, and unusable then, if `work` differs."""
        self._steps += 1
        if len(work) != len(self._work):
            return False
        if not all(map(self._follows, work, self._work, self._held)):
            return False
        self._counting += 1
        self._until_full -= 1
        if not self._until_full:
            for row in np.flatnonzero(self._offsets == self._block_size).tolist():
                if not self._next_block(row, work[row]):
                    return False
            self._until_full = self._first_full()
        for row, each in enumerate(work):
            tokens, place = each.request.tokens, each.start + each.request.dropped
            self._tokens[row] = tokens[place] if place < len(tokens) else 0
        forward = self.batch.forward
        self.batch = replace(
            self.batch,
            forward=replace(forward, max_context=forward.max_context + 1),
            samples=tuple(
                Sample(request, row, place + 1) for request, row, place in self.batch.samples
            ),
        )
        return True

    def _follows(self, work: Work, first: Work, blocks: object) -> bool:
        """Whether it is the next token of the same request, whose list of blocks only grew."""
        return (
            work.request is first.request
            and work.start == first.start + self._steps
            and work.count == 1
            and self._table_of(work.request.id).blocks is blocks
        )

    def _next_block(self, row: int, work: Work) -> bool:
        """Move a request to the start of its next block; False if the table has no column left."""
        index = work.start // self._block_size
        if index == self._blocks.shape[1]:
            return False
        blocks, bases = self._table_of(work.request.id)
        self._blocks[row, index], self._bases[row, index] = blocks[index], bases[index]
        self._positions[row], self._offsets[row] = bases[index], 0
        self._slots[row] = blocks[index] * self._block_size
        return True
