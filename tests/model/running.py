"""Runs a Decoder over hand-made batches, without scheduler or manager."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ropewalk.cache.kv import KVCache, LayerKV
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.decoder import Decoder

CPU = torch.device("cpu")


def new_cache(
    decoder: Decoder, blocks: int, block_size: int = 16, stored: torch.dtype | None = None
) -> KVCache:
    """stored: the dtype of its entries, if not the decoder's."""
    config = decoder.config
    return KVCache(
        config,
        blocks=blocks,
        block_size=block_size,
        dtype=stored or decoder.dtype,
        device=decoder.device,
        gates=decoder.gates,
    )


def entries(kv: LayerKV) -> torch.Tensor:
    """A copy: keys and values [2, ..., kv_heads, head_dim], with the gates that belong to a key."""
    if kv.gates is None:
        return torch.stack((kv.keys, kv.values))
    gates = kv.gates.transpose(-1, -2).reshape(*kv.keys.shape[:-1], -1).to(kv.keys.dtype)
    return torch.stack((torch.cat((kv.keys, gates), dim=-1), torch.cat((kv.values, gates), dim=-1)))


def full_of_nan(kv: KVCache) -> KVCache:
    """Like uninitialised memory: anything read from it shows up in results."""
    for tensor in kv.whole:
        if tensor.is_floating_point():  # in 8 bits the scales
            tensor.fill_(torch.nan)
    return kv


@dataclass
class Running:
    """A request as the model sees it: its tokens, how many are computed, and where they live."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    base: int = 0  # position of its first token
    logits: list[torch.Tensor] = field(default_factory=list)


def make_batch(
    work: Sequence[tuple[Running, int]], block_size: int, table_width: int | None = None
) -> ForwardBatch:
    """The next `count` tokens of each sequence; logits of every row are wanted."""
    tokens, positions, offsets, slots, starts, contexts = [], [], [], [], [0], []
    width = table_width or max(len(sequence.blocks) for sequence, _ in work)
    tables = torch.zeros(len(work), width, dtype=torch.int64)
    bases = torch.zeros(len(work), width, dtype=torch.int64)
    for row, (sequence, count) in enumerate(work):
        for index in range(sequence.computed, sequence.computed + count):
            tokens.append(sequence.tokens[index])
            positions.append(sequence.base + index)
            offsets.append(index % block_size)
            slots.append(sequence.blocks[index // block_size] * block_size + index % block_size)
        starts.append(len(tokens))
        contexts.append(sequence.computed + count)
        tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        bases[row, : len(sequence.blocks)] = (
            torch.arange(len(sequence.blocks)) * block_size + sequence.base
        )
    return ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        offsets=torch.tensor(offsets),
        slots=torch.tensor(slots),
        query_starts=torch.tensor(starts),
        context_lens=torch.tensor(contexts),
        block_tables=tables,
        block_bases=bases,
        output_rows=torch.arange(len(tokens)),
        max_query=max(count for _, count in work),
        max_context=max(contexts),
    )


def run_uncached(
    decoder: Decoder,
    tokens: Sequence[int],
    *,
    base: int = 0,
    block_size: int = 16,
    make_cache: Callable[[Decoder, int, int], KVCache] = new_cache,
) -> torch.Tensor:
    """One pass over all tokens: logits [T, vocab]."""
    needed = -(-len(tokens) // block_size)
    sequence = Running(list(tokens), list(range(1, needed + 1)), base=base)
    kv = make_cache(decoder, needed + 1, block_size)
    return decoder(make_batch([(sequence, len(tokens))], block_size), kv)
