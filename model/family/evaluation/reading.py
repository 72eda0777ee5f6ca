"""Texts read by a trained decoder through the paged cache, in chunks that need little memory.

Exactly what the server computes, whatever the length; tests/model compare it with whole passes.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cache.kv import KVCache
from cache.manager import Table
from cache.terms import BLOCK_SIZE
from model.batch import in_order, of_one
from model.transformer import Decoder

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
        self._table = in_order(blocks, BLOCK_SIZE)

    def read(self, tokens: Sequence[int], *, wanted: int, start: int = 0) -> Tensor:
        """As in `Reads`."""
        return forward(self._decoder, self._kv, self._table, tokens, wanted=wanted, start=start)


def new_cache(decoder: Decoder, blocks: int) -> KVCache:
    """In the decoder's dtype and place."""
    weight = decoder.embed.weight
    return KVCache(
        decoder.config,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        dtype=weight.dtype,
        device=weight.device,
    )


def forward(
    decoder: Decoder, kv: KVCache, table: Table, tokens: Sequence[int], *, wanted: int, start: int
) -> Tensor:
    """As in `Reads`, of a sequence whose blocks are the table's."""
    first = len(tokens) - wanted
    found = []
    for begin in range(start, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        here, last = tokens[begin:end], max(end - max(first, begin), 0)
        batch = of_one(here, begin, table, BLOCK_SIZE, wanted=last, device=kv.device)
        found.append(decoder(batch, kv).float().log_softmax(-1))
    return torch.cat(found)
