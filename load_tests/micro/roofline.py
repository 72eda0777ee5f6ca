"""Measures a device's peak rates with plain torch; from them, the least time of a pass.

A decode pass reads every weight once and every key and value that its requests see, so it takes at
least as long as that many bytes at the bandwidth of a copy, counting reads and writes (Williams,
Waterman and Patterson, "Roofline", CACM 52(4)). A prompt's pass takes at least its multiplications
at the speed of one large matrix product. The read bandwidth of all cores bounds a single stream of
the servers that load_tests/peers/peers.py compares.
"""

import math
import os
from dataclasses import dataclass
from functools import partial

import torch

from ropewalk.cache.huge_pages import HugePages
from ropewalk.cache.kv import bytes_per_token
from ropewalk.load_tests.common.rounds import Clock, rounds
from ropewalk.model.architectures.ropewalk import shapes
from ropewalk.model.config import ModelConfig

COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes copied or read: many times a processor's cache
SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices
TRIALS = 10


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The peak rates of an otherwise idle device."""

    bytes_per_s: float  # read and written
    operations_per_s: float  # a multiplication and an addition are two

    def decode_seconds(
        self, config: ModelConfig, dtype: torch.dtype, requests: int, context: int
    ) -> float:
        """The least time of a pass that gives each request of that context its next token."""
        read = weight_bytes(config, dtype) + kv_bytes(config, dtype, requests, context)
        return read / self.bytes_per_s

    def prefill_seconds(self, config: ModelConfig, tokens: int) -> float:
        """The least time of a pass over one prompt, from its linear layers alone."""
        head = config.vocab_size * (config.embed_width or config.hidden_size)  # last row only
        products = (_weights(config) - head) * tokens + head
        return 2 * products / self.operations_per_s


def ceiling(device: torch.device, dtype: torch.dtype, clock: Clock) -> Ceiling:
    """The best of some trials. Matrices are random: zeros are multiplied faster."""
    generator = torch.Generator(device).manual_seed(0)
    size, side = COPIED[device.type] // dtype.itemsize, SIDE[device.type]
    source = torch.ones(size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    left, right = (
        torch.empty(side, side, dtype=dtype, device=device).normal_(generator=generator)
        for _ in range(2)
    )
    calls = {"copy": partial(target.copy_, source), "product": partial(torch.mm, left, right)}
    taken = list(rounds(calls, TRIALS, clock, "0"))
    copy, product = (min(each[name] for each in taken) for name in calls)
    return Ceiling(2 * size * dtype.itemsize / copy, 2 * side**3 / product)


def read_rates() -> list[float]:
    """Bytes per second that all cores together read from memory, in each trial.

    A bound for other processes' servers, so it does not depend on this one's number of threads.
    """
    count = COPIED["cpu"] // torch.float32.itemsize
    numbers = HugePages().empty(count, dtype=torch.float32).fill_(1)
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        trials = list(rounds({"read": numbers.sum}, TRIALS, "wall", "0"))
    finally:
        torch.set_num_threads(before)
    return [COPIED["cpu"] / trial["read"] for trial in trials]


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that every pass reads, whatever its batch."""
    return _weights(config) * dtype.itemsize


def kv_bytes(config: ModelConfig, dtype: torch.dtype, requests: int, context: int) -> int:
    """Bytes of keys and values, over all layers."""
    return bytes_per_token(config, dtype) * requests * context


def _weights(config: ModelConfig) -> int:
    """Number of weights, without tables of which a token reads one row: untied embeddings."""
    found = {
        name: math.prod(shape)
        for name, shape in shapes(config).items()
        if "encoding" not in name.split(".")
    }
    if not config.tied_embeddings:
        del found["embed.weight"]
    return sum(found.values())
