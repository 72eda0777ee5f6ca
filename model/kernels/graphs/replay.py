"""Decode steps in fixed buffers, so that a device can replay them.

Such a step always launches the same kernels, so it is recorded once for every bucket of sizes (on
a GPU as a CUDA graph) and replayed with each step's integers. Steps with a prompt in them are
computed without replay.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import Cross, ForwardBatch
from ropewalk.model.decoder import Forward

SHORTEST = 1024  # tokens: shorter contexts have no buckets of their own
# Tokens of a bucket's requests, for each of the cache: one long request may be among many short
# ones. What their kernels need for a token is a small part of its keys and values, unless a bias is
# dense.
CROWDED = 8

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]  # returns a replay of its argument's work


class Bucket:
    """Buffers for a step that computes one token per request.

    Unused rows are all zeros: they attend to no keys, store their own in slot 0, which no
    request uses, and their logits are discarded.
    """

    def __init__(self, requests: int, context: int, kv: KVCache, *, encoded: bool = False) -> None:
        """For at most `requests` requests, each with at most `context` keys.

        encoded: each request also attends to an encoded prompt, of at most `context` keys.
        """
        self.requests = requests
        self.context = context
        self._block_size = kv.block_size
        # Integers per request, and tables: of blocks and their bases, for each context.
        self._integers, self._tables = (6, 4) if encoded else (5, 2)
        columns = -(-context // kv.block_size)
        size = requests * (self._integers + self._tables * columns)
        self._memory = torch.zeros(size, dtype=torch.int64, device=kv.device)
        (tokens, positions, offsets, slots, *lengths), tables = self._parts(self._memory)
        rows = torch.arange(requests + 1, device=kv.device)
        self.batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            offsets=offsets,
            slots=slots,
            query_starts=rows,
            context_lens=lengths[0],
            block_tables=tables[0],
            block_bases=tables[1],
            output_rows=rows[:-1],
            max_query=1,
            max_context=context,
        )
        if encoded:
            seen = replace(
                self.batch, context_lens=lengths[1], block_tables=tables[2], block_bases=tables[3]
            )
            self.batch = replace(self.batch, cross=Cross(None, seen))

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether a batch fits: it computes one row per request and needs the logits of all."""
        requests = len(batch.context_lens)
        return (
            batch.max_query == 1
            and not batch.hidden
            and len(batch.output_rows) == requests <= self.requests
            and all(each.max_context <= self.context for each in _contexts(batch))
            and (batch.cross is None) == (self.batch.cross is None)
            and (batch.cross is None or batch.cross.new is None)
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Load a batch that fits and is on the host, in one asynchronous copy.

        Tokens known only on the device (`coming`) are copied there.
        """
        pinned = self._memory.device.type == "cuda"
        host = torch.zeros(self._memory.shape, dtype=torch.int64, pin_memory=pinned)
        rows, tables = self._parts(host)
        requests, contexts = len(batch.tokens), _contexts(batch)
        lengths = [each.context_lens for each in contexts]
        rows[:, :requests] = torch.stack(
            [batch.tokens, batch.positions, batch.offsets, batch.slots, *lengths]
        )
        for index, each in enumerate(contexts):
            used = -(-each.max_context // self._block_size)
            tables[2 * index, :requests, :used] = each.block_tables[:, :used]
            tables[2 * index + 1, :requests, :used] = each.block_bases[:, :used]
        self._memory.copy_(host, non_blocking=True)
        if batch.coming is not None:
            self.batch.tokens[:requests] = batch.coming

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Views: integers [.., requests], and tables [.., requests, columns]."""
        rows, tables = memory.tensor_split([self._integers * self.requests])
        return (rows.view(self._integers, -1), tables.view(self._tables, self.requests, -1))


def _contexts(batch: ForwardBatch) -> tuple[ForwardBatch, ...]:
    """The batch, over the keys of its answers; then as it is over those of encoded prompts."""
    return (batch,) if batch.cross is None else (batch, batch.cross.seen)


def buckets(
    kv: KVCache, max_seqs: int, max_context: int, *, encoded: bool = False, crowded: int = CROWDED
) -> list[Bucket]:
    """Largest first, so that later recordings fit into the memory of the first.

    Powers of two of requests by powers of four of tokens. Combinations whose contexts exceed the
    cache too far are left out: their kernels need more memory than such steps are worth.
    """
    room = max(crowded * kv.blocks * kv.block_size, max_seqs * SHORTEST)
    sizes = [
        (requests, context)
        for requests in _steps(1, 2, max_seqs)
        for context in _steps(SHORTEST, 4, max_context)
        if requests * context <= room
    ]
    return [Bucket(*size, kv, encoded=encoded) for size in reversed(sizes)]


def _steps(first: int, factor: int, last: int) -> Iterator[int]:
    """first, first · factor, ..., last."""
    while first < last:
        yield first
        first *= factor
    yield last


class ReplayedDecoder:
    """Called like the decoder, over one cache. Batches that fit no bucket go to `otherwise`.

    Logits are valid until the next call: all buckets use the same memory for them.
    """

    def __init__(
        self,
        decoder: Forward,
        kv: KVCache,
        otherwise: Forward,
        buckets: Iterable[Bucket],
        record: Record,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._otherwise = otherwise
        self._logits: Tensor | None = None
        made = [(bucket, record(partial(self._compute, bucket))) for bucket in buckets]
        self._recorded = made[::-1]  # the smallest first

    def __call__(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        assert kv is self._kv, "what was recorded reads and writes one cache"
        for bucket, replay in self._recorded:
            if bucket.holds(batch):
                bucket.fill(batch)
                return replay()[: len(batch.tokens)]
        return self._otherwise(batch, kv)

    def _compute(self, bucket: Bucket) -> Tensor:
        logits = self._decoder(bucket.batch, self._kv)
        if self._logits is None:  # the first bucket has the most requests
            self._logits = torch.empty_like(logits)
        return self._logits[: bucket.requests].copy_(logits)
