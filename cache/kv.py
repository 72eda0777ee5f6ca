"""The tensors of the paged KV cache. Which sequence holds which block is cache/manager.py's job."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# Of keys and values in 8 bits: equal steps, with an entry's largest magnitude at ±127. All of it is
# float32 in one fixed order, as the CPU kernels (linear/integers.hpp) must store identical bits.
SCALE = torch.float32
GATE = torch.float32  # sums of thousands are taken
STEPS = 127
LEAST = 1e-30  # lower bound of the largest magnitude: avoids dividing by 0 for an entry of zeros

Change = Callable[[Tensor], Tensor]  # entries → entries of the same shape and dtype


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each.

    Where the encoding has gates, also their logarithms, [blocks, heads, block_size] float32: a
    head's side by side, as they are added up. Iterating gives every tensor.
    """

    keys: Tensor
    values: Tensor
    gates: Tensor | None = field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[Tensor]:
        of_keys, of_values = self.parts
        return iter((self.keys, self.values, *of_keys[1:], *of_values[1:]))

    @property
    def parts(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The tensors that store keys and what belongs to them, and those that store values."""
        return (self.keys, *self._of_tokens), (self.values,)

    @property
    def _of_tokens(self) -> tuple[Tensor, ...]:
        """What is stored beside a token's keys."""
        return () if self.gates is None else (self.gates,)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k and v, [T, kv_heads, head_dim], at slots [T] = block · block_size + offset."""
        _at_slots(self.keys, slots, k)
        _at_slots(self.values, slots, v)

    def write_gates(self, gates: Tensor, slots: Tensor) -> None:
        """Store logarithms of gates, [T, heads], in the same way."""
        assert self.gates is not None, "the cache was made without room for gates"
        size = self.gates.shape[-1]
        self.gates[slots // size, :, slots % size] = gates.to(self.gates.dtype)

    def read(self, *index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [...], or at blocks and offsets [...], converted to `dtype`."""
        return self.keys[index].to(dtype), self.values[index].to(dtype)

    def change_keys(self, blocks: Tensor, change: Change) -> None:
        """Replace the keys of blocks [N] by `change` of them."""
        self.keys[blocks] = change(self.keys[blocks])


@dataclass(frozen=True, slots=True)
class Int8LayerKV(LayerKV):
    """The same with entries in 8 bits: int8 values with one float32 scale per entry."""

    key_scales: Tensor  # [blocks, block_size, kv_heads] float32
    value_scales: Tensor

    @property
    def parts(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """As in LayerKV."""
        return (self.keys, self.key_scales, *self._of_tokens), (self.values, self.value_scales)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """As in LayerKV; attention then reads the rounded entries, not k and v."""
        numbers, scales = rounded(torch.stack((k, v)))
        stored = self.keys, self.values, self.key_scales, self.value_scales
        for own, new in zip(stored, (*numbers, *scales), strict=True):
            _at_slots(own, slots, new)

    def read(self, *index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As in LayerKV."""
        return (
            restored(self.keys[index], self.key_scales[index], dtype),
            restored(self.values[index], self.value_scales[index], dtype),
        )

    def change_keys(self, blocks: Tensor, change: Change) -> None:
        """As in LayerKV; `change` is applied in float32, and its result rounded again."""
        keys = restored(self.keys[blocks], self.key_scales[blocks], torch.float32)
        self.keys[blocks], self.key_scales[blocks] = rounded(change(keys))


PagedKV = LayerKV  # of either kind


class Shape(Protocol):
    """What a cache needs to know of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class KVCache:
    """One PagedKV per layer, allocated once. `dtype`: of stored entries; int8 adds scales.

    gates: how many are stored beside each token's keys, 0 unless the encoding has gates.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        gates: int = 0,
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.num_layers, self.num_kv_heads = shape.num_layers, shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.dtype = dtype
        self.device = device
        size = (self.num_layers, blocks, block_size, self.num_kv_heads)
        # Not cleared: a slot is written before it is read, and untouched memory costs nothing. Not
        # empty_like either: on "meta" it makes torch import modules for seconds.
        self._keys = torch.empty(*size, self.head_dim, dtype=dtype, device=device)
        self._values = torch.empty(*size, self.head_dim, dtype=dtype, device=device)
        self._scales: Tensor | None = None  # [2, ...]: those of keys and those of values
        if dtype is torch.int8:
            self._scales = torch.empty(2, *size, dtype=SCALE, device=device)
        self._gates: Tensor | None = None
        if gates:
            size = (self.num_layers, blocks, gates, block_size)
            self._gates = torch.empty(*size, dtype=GATE, device=device)

    def layer(self, index: int) -> PagedKV:
        keys, values = self._keys[index], self._values[index]
        gates = None if self._gates is None else self._gates[index]
        if self._scales is None:
            return LayerKV(keys, values, gates=gates)
        return Int8LayerKV(keys, values, *self._scales[:, index], gates=gates)

    @property
    def whole(self) -> PagedKV:
        """All layers at once: every tensor is [layers, blocks, ...]."""
        if self._scales is None:
            return LayerKV(self._keys, self._values, gates=self._gates)
        return Int8LayerKV(self._keys, self._values, *self._scales, gates=self._gates)

    @property
    def entries_per_token(self) -> int:
        """K and V vectors stored for one token, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads

    @property
    def bytes_per_entry(self) -> int:
        return bytes_per_entry(self.head_dim, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        gates = 0 if self._gates is None else self._gates.shape[2]
        return bytes_per_token(self, self.dtype, gates)


def bytes_per_entry(head_dim: int, dtype: torch.dtype) -> int:
    """Size of one stored key or value, including its scale if it has one."""
    return head_dim * dtype.itemsize + (SCALE.itemsize if dtype is torch.int8 else 0)


def bytes_per_token(shape: Shape, dtype: torch.dtype, gates: int = 0) -> int:
    """Size of the keys, values and gates of one token, over all layers."""
    entries = 2 * shape.num_kv_heads * bytes_per_entry(shape.head_dim, dtype)
    return shape.num_layers * (entries + gates * GATE.itemsize)


def _at_slots(stored: Tensor, slots: Tensor, new: Tensor) -> None:
    stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, new)


def rounded(entries: Tensor) -> tuple[Tensor, Tensor]:
    """[..., head_dim] → int8 of that shape and scales [...]; `restored` approximately inverts it.

    No value is off by more than half a scale, 0.4% of the largest. An entry that is not finite
    gets a scale that is not finite, so that it cannot pass for a valid one.
    """
    wide = entries.to(SCALE)
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    steps = torch.full_like(largest, STEPS) / largest
    return torch.round(wide * steps[..., None]).to(torch.int8), largest * (1 / STEPS)


def restored(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate inverse of `rounded`: a product in float32 or wider, then cast to `dtype`."""
    wide = torch.promote_types(dtype, SCALE)
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's memory on `device`, copied asynchronously."""
    if device.type == "cuda":
        host = host.pin_memory()  # or the copy would wait; torch frees it when the copy is done
    return host.to(device, non_blocking=True)


def tensor_on(
    device: torch.device, values: Sequence[object], dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of `values` on `device`, copied asynchronously."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
