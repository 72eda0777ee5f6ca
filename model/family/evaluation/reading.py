"""Reads texts with a trained decoder through the paged cache, in chunks that need little memory.

Exactly what the server computes, at any length; tests/model compare it with unchunked passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import Table
from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.model.batch import in_order, of_one
from ropewalk.model.decoder import Decoder

CHUNK = 512  # tokens per pass


class Reader:
    """One decoder with a cache for one text of at most `capacity` tokens."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        blocks = -(-capacity // BLOCK_SIZE)
        self._decoder = decoder
        self._kv = KVCache(
            decoder.config,
            blocks=blocks,
            block_size=BLOCK_SIZE,
            dtype=decoder.dtype,
            device=decoder.device,
            gates=decoder.gates,
        )
        self._table = in_order(blocks, BLOCK_SIZE)

    def read(self, tokens: Sequence[int], *, wanted: int, start: int = 0) -> Tensor:
        """Log-probabilities [wanted, vocab] of the tokens that follow each of the last ones.

        Positions before `start` are not computed again: the cache still holds them.
        """
        return forward(self._decoder, self._kv, self._table, tokens, wanted=wanted, start=start)


def forward(
    decoder: Decoder, kv: KVCache, table: Table, tokens: Sequence[int], *, wanted: int, start: int
) -> Tensor:
    """As `Reader.read`, for a sequence in the table's blocks."""
    first = len(tokens) - wanted
    found = []
    for begin in range(start, len(tokens), CHUNK):
        end = min(begin + CHUNK, len(tokens))
        here, last = tokens[begin:end], max(end - max(first, begin), 0)
        batch = of_one(here, begin, table, BLOCK_SIZE, wanted=last, device=kv.device)
        found.append(decoder(batch, kv).float().log_softmax(-1))
    return torch.cat(found)
