"""Texts read by a trained decoder through the paged cache, in chunks that need little memory.

Exactly what the server computes, whatever the length; tests/model compare it with whole passes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cache.kv import KVCache
from cache.manager import Table
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.transformer import Decoder

BLOCK_SIZE = 16
CHUNK = 512  # tokens of one pass


class Reads(Protocol):
    """A Reader, or what stands in for one."""

    def read(self, tokens: Sequence[int], *, wanted: int, start: int = 0) -> Tensor:
        """Log-probabilities [wanted, vocab] of what follows each of the last tokens.

        What was read before position `start` is used as it is.
        """
        ...


class Reader:
    """One decoder and room for one text of at most `capacity` tokens."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        blocks = -(-capacity // BLOCK_SIZE)
        self._decoder = decoder
        self._kv = new_cache(decoder, blocks)
        self._table = Table(range(blocks), range(0, blocks * BLOCK_SIZE, BLOCK_SIZE))

    def read(self, tokens: Sequence[int], *, wanted: int, start: int = 0) -> Tensor:
        """As in `Reads`."""
        return forward(self._decoder, self._kv, self._table, tokens, wanted=wanted, start=start)


def new_cache(decoder: Decoder, blocks: int) -> KVCache:
    """In the decoder's dtype and place."""
    config: ModelConfig = decoder.config
    return KVCache(
        layers=config.layers,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.embed.weight.dtype,
        device=decoder.embed.weight.device,
    )


def forward(
    decoder: Decoder, kv: KVCache, table: Table, tokens: Sequence[int], *, wanted: int, start: int
) -> Tensor:
    """As in `Reads`, of a sequence whose blocks are the table's."""
    first = len(tokens) - wanted
    found = []
    for begin in range(start, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        batch = _batch(tokens[begin:end], begin, max(first - begin, 0), table, kv.device)
        found.append(decoder(batch, kv).float().log_softmax(-1))
    return torch.cat(found)


def _batch(
    tokens: Sequence[int], begin: int, skipped: int, table: Table, device: torch.device
) -> ForwardBatch:
    """Tokens number `begin` and later of one sequence; all but the `skipped` first are wanted."""
    count, end = len(tokens), begin + len(tokens)
    index = torch.arange(begin, end, device=device)
    used = -(-end // BLOCK_SIZE)
    blocks = torch.tensor(list(table.blocks[:used]), device=device)
    bases = torch.tensor(list(table.bases[:used]), device=device)
    return ForwardBatch(
        tokens=torch.tensor(list(tokens), device=device),
        positions=bases[index // BLOCK_SIZE] + index % BLOCK_SIZE,
        offsets=index % BLOCK_SIZE,
        slots=blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE,
        query_starts=torch.tensor([0, count], device=device),
        context_lens=torch.tensor([end], device=device),
        block_tables=blocks[None],
        block_bases=bases[None],
        output_rows=torch.arange(min(skipped, count), count, device=device),
        max_query=count,
        max_context=end,
    )
