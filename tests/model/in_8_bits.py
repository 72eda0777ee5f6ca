"""An independent implementation of 8-bit keys and values, as cache/kv.py defines them.

Rounded values are kept in float64, so the float reference attends to exactly them.
"""

import numpy as np
import torch

from ropewalk.cache.kv import Int8LayerKV, KVCache, LayerKV, rounded
from tests.model.running import CPU


def by_hand(entries):
    """[..., head_dim] rounded to 8 bits and back, in float64."""
    wide = entries.float().numpy()
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    numbers = np.rint(wide * (np.float32(127) / largest)).astype(np.float64)
    return torch.from_numpy(numbers * (largest * np.float32(1 / 127)).astype(np.float64))


class ByHand(LayerKV):
    """One layer's keys and values, rounded when written."""

    def write(self, k, v, slots):
        super().write(by_hand(k), by_hand(v), slots)


class CacheByHand(KVCache):
    def layer(self, index):
        kv = super().layer(index)
        return ByHand(kv.keys, kv.values, gates=kv.gates)


def cache_by_hand(decoder, blocks, block_size):
    return CacheByHand(
        decoder.config,
        blocks=blocks,
        block_size=block_size,
        dtype=torch.float64,
        device=CPU,
        gates=decoder.gates,
    )


def in_8_bits(kv):
    """The content of a LayerKV, as stored by the code under test."""
    (keys, key_scales), (values, value_scales) = (rounded(part) for part in kv)
    return Int8LayerKV(keys, values, key_scales, value_scales)
