"""Runs a loaded model's first passes, in the reserved block 0, to test and to time it.

A broken model is found before a client uses it. The times serve only for estimates.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import Table
from ropewalk.cache.operations import BLOCKS_AT_ONCE
from ropewalk.model.batch import Cross, ForwardBatch, of_one
from ropewalk.model.catalogue import example
from ropewalk.model.config import EncoderDecoderConfig, ModelConfig
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.base import find
from ropewalk.model.formatting import in_one_line
from ropewalk.model.sampler import Sampler
from ropewalk.model.sampling import Ask, SamplingParams
from ropewalk.server.errors import CommandError

REPETITIONS = 3
PATIENCE = 0.5  # seconds, after which no further repetition begins
# What a GPU has a kernel of its own for.
DRAW = Ask(SamplingParams(max_tokens=1, top_p=0.9), [], 0, 0.5)
DISTANCE = 1000  # positions; how far a key is rotated does not change the time it takes


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that one block takes here, over all layers."""

    turn: float  # rotating its keys to other positions
    copy: float  # copying its keys and values to another block
    compute: float  # computing its tokens, with none before them


def warm_up(
    decoder: Decoder, sampler: Sampler, kv: KVCache, shape: ModelConfig, context: int, name: str
) -> Speed:
    """Raises CommandError when the first pass or draw fails, or logits are not finite.

    Leaves nothing that a request reads.
    """
    # Fresh memory may hold anything, also numbers that are slow to compute with.
    for part in kv.whole:
        part[:, 0] = 0
    first = Table(blocks=[0], bases=[0])
    batch, single = (
        of_one([0] * count, 0, first, kv.block_size, wanted=1, device=kv.device)
        for count in (min(kv.block_size, context), 1)
    )
    if isinstance(decoder.config, EncoderDecoderConfig):
        batch = replace(batch, cross=Cross(new=batch, seen=batch))
        single = replace(single, cross=Cross(new=single, seen=single))
    # On a GPU a token by itself takes other kernels; a request would wait until they are compiled.
    if not all(_is_finite(decoder, sampler, each, kv, name) for each in (batch, single)):
        raise CommandError(f"{name} computes logits that are not finite; try --dtype float32")
    if isinstance(decoder.config, EncoderDecoderConfig):
        batch = replace(batch, cross=Cross(new=None, seen=batch))
    return Speed(
        turn=_seconds(_turn(kv, shape), kv.device) / BLOCKS_AT_ONCE,
        copy=_seconds(_copy(kv), kv.device) / BLOCKS_AT_ONCE,
        compute=_seconds(lambda: decoder(batch, kv), kv.device),
    )


def _is_finite(
    decoder: Decoder, sampler: Sampler, batch: ForwardBatch, kv: KVCache, name: str
) -> bool:
    try:
        logits = decoder(batch, kv)
        if kv.device.type != "cpu":
            sampler.pick(logits, [DRAW])
        return bool(logits.isfinite().all())
    except Exception as error:  # out of memory, a kernel's, or from somebody else's encoding
        raise CommandError(
            f"{name}: the first forward pass failed ({in_one_line(error)}); lower --kv-memory to "
            "leave it more memory, or use --attention sdpa to avoid Ropewalk's own kernels"
        ) from error


def _turn(kv: KVCache, shape: ModelConfig) -> Callable[[], None]:
    """Rotates as many blocks as a context shift does at once, all of them being block 0."""
    width = shape.head_dim // 2 * 2
    rope = example(find("rope"), replace(shape, trained_context=1), 1, {"width": width})
    blocks = torch.zeros(BLOCKS_AT_ONCE, dtype=torch.int64, device=kv.device)

    def act() -> None:
        for layer in range(kv.num_layers):
            kv.layer(layer).change_keys(blocks, partial(rope.shift, delta=DISTANCE))

    return act


def _copy(kv: KVCache) -> Callable[[], None]:
    """Copies as many blocks as are copied at once, all of them being block 0."""
    blocks = torch.zeros(BLOCKS_AT_ONCE, dtype=torch.int64, device=kv.device)

    def act() -> None:
        for layer in range(kv.num_layers):
            for part in kv.layer(layer):
                part[blocks] = part[blocks]

    return act


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs after a warm-up run.

    Of fewer, or of the first run alone, if they take long: startup must not wait for estimates.
    """
    taken: list[float] = []
    while len(taken) <= REPETITIONS and sum(taken) < PATIENCE:
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:] or taken)
