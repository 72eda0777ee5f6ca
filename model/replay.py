"""Decode steps in buffers that stay where they are, so that a device can play them again.

What is launched for such a step is always the same, so it is recorded once for every bucket of
sizes (on a GPU as a CUDA graph) and played with a step's integers. Mixed steps are computed as
they come.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from cache.kv import KVCache
from model.batch import ForwardBatch

SHORTEST = 1024  # tokens: shorter contexts have no buckets of their own
ROWS = 5  # integers of each request, besides its blocks and their bases

Forward = Callable[[ForwardBatch, KVCache], Tensor]
Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]  # what plays again what a function has a device do


class Bucket:
    """Buffers of a step that computes one token for each request.

    A row that no request has is all zeros: it sees no keys, stores its own in slot 0, where no
    request has any, and its logits are nobody's.
    """

    def __init__(self, requests: int, context: int, kv: KVCache) -> None:
        """For at most so many requests, and so many keys of each."""
        self.requests = requests
        self.context = context
        self._block_size = kv.block_size
        self._columns = -(-context // kv.block_size)
        size = requests * (ROWS + 2 * self._columns)
        self._memory = torch.zeros(size, dtype=torch.int64, device=kv.device)
        (tokens, positions, offsets, slots, lengths), (blocks, bases) = self._parts(self._memory)
        rows = torch.arange(requests + 1, device=kv.device)
        self.batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            offsets=offsets,
            slots=slots,
            query_starts=rows,
            context_lens=lengths,
            block_tables=blocks,
            block_bases=bases,
            output_rows=rows[:-1],
            max_query=1,
            max_context=context,
        )

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether it computes and wants a row of every request, and has room here."""
        requests = len(batch.context_lens)
        return (
            batch.max_query == 1
            and batch.cross is None
            and len(batch.output_rows) == requests <= self.requests
            and batch.max_context <= self.context
        )

    def fill(self, batch: ForwardBatch) -> None:
        """With a batch that it holds and that lies on the host. Nobody waits for the one copy.

        Tokens that are coming follow it, from where they are on the device.
        """
        pinned = self._memory.device.type == "cuda"
        host = torch.zeros(self._memory.shape, dtype=torch.int64, pin_memory=pinned)
        rows, tables = self._parts(host)
        requests, used = len(batch.tokens), -(-batch.max_context // self._block_size)
        rows[:, :requests] = torch.stack(
            (batch.tokens, batch.positions, batch.offsets, batch.slots, batch.context_lens)
        )
        tables[0, :requests, :used] = batch.block_tables[:, :used]
        tables[1, :requests, :used] = batch.block_bases[:, :used]
        self._memory.copy_(host, non_blocking=True)
        if batch.coming is not None:
            self.batch.tokens[:requests] = batch.coming

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Views: [ROWS, requests], and blocks and their bases [2, requests, columns]."""
        rows, tables = memory.tensor_split([ROWS * self.requests])
        return rows.view(ROWS, -1), tables.view(2, self.requests, -1)


def buckets(kv: KVCache, max_seqs: int, max_context: int) -> list[Bucket]:
    """The largest first: what is recorded later finds room in its memory.

    By powers of two of requests and of four of tokens. None where so many contexts of that length
    would not fit the cache: kernels then need more memory than such steps are worth.
    """
    room = max(kv.blocks * kv.block_size, max_seqs * SHORTEST)
    sizes = [
        (requests, context)
        for requests in _steps(1, 2, max_seqs)
        for context in _steps(SHORTEST, 4, max_context)
        if requests * context <= room
    ]
    return [Bucket(requests, context, kv) for requests, context in reversed(sizes)]


def _steps(first: int, factor: int, last: int) -> Iterator[int]:
    """first, first · factor, ..., last."""
    while first < last:
        yield first
        first *= factor
    yield last


class ReplayedDecoder:
    """Called as the decoder is, over one cache. Where no bucket holds a batch, `otherwise` is.

    Logits are good until the next call: those of all buckets lie in the same place.
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
        if self._logits is None:  # buckets with the most requests come first
            self._logits = torch.empty_like(logits)
        return self._logits[: bucket.requests].copy_(logits)
