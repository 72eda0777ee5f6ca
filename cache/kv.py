"""The tensors of the paged KV cache. Which block belongs to whom is cache/manager.py's affair."""

from typing import NamedTuple

import torch
from torch import Tensor


class LayerKV(NamedTuple):
    """Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k and v, [T, kv_heads, head_dim], at slots [T] = block · block_size + offset."""
        self.keys.view(-1, *self.keys.shape[2:]).index_copy_(0, slots, k)
        self.values.view(-1, *self.values.shape[2:]).index_copy_(0, slots, v)


class KVCache:
    """One LayerKV per layer, allocated once."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.layers = layers
        self.kv_heads = kv_heads
        self.dtype = dtype
        self.device = device
        # Not cleared: a slot is written before it is read, and untouched memory costs nothing.
        self._keys = torch.empty(
            layers, blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device
        )
        self._values = torch.empty_like(self._keys)

    def layer(self, index: int) -> LayerKV:
        return LayerKV(self._keys[index], self._values[index])

    @property
    def whole(self) -> LayerKV:
        """All layers at once: [layers, blocks, block_size, kv_heads, head_dim] each."""
        return LayerKV(self._keys, self._values)

    @property
    def entries_per_token(self) -> int:
        """K and V vectors stored for one token, over all layers."""
        return 2 * self.layers * self.kv_heads

    @property
    def bytes_per_entry(self) -> int:
        return self._keys.shape[-1] * self._keys.element_size()

    @property
    def bytes_per_token(self) -> int:
        return self.entries_per_token * self.bytes_per_entry
