"""Keys and values in 8 bits: every backend attends to just what is stored, whatever is added or
turned. The oracle rounds by itself and is the float reference from there on.
"""

from dataclasses import replace

import pytest
import torch

from ropewalk.cache.kv import LayerKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.kernels.cpu.attention import CpuBackend
from tests.model.attention.test_cpu import InParts, biases, problem, spec
from tests.model.attention.test_rotation import LENGTHS, in_order, made, placed, stored
from tests.model.attention.triton_here import DEVICE, TritonHere
from tests.model.in_8_bits import by_hand, in_8_bits
from tests.products import pairs

# In bfloat16 sdpa rounds what it dequantises, and all of them their answer.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03}
SHORT = [(30, 1), (17, 2), (0, 9)]  # for Triton's interpreter
STORAGES = {
    KeyStorage.ABSOLUTE: {},
    KeyStorage.RAW: {"layout": "interleaved", "width": 8},
    KeyStorage.BLOCK: {"width": 16},
}


def exactly(given, q, kv, batch, bias, rotation):
    wide = LayerKV(*(by_hand(part) for part in kv))
    attend = ReferenceAttention(replace(given, dtype=torch.float64))
    return attend(q.double(), wide, batch, bias, rotation)


def backends(kernels, dtype=torch.float32):
    """Those that compute in a dtype; the CPU kernels have no float64 for these."""
    others = () if dtype is torch.float64 else (CpuBackend(kernels),)
    return ReferenceAttention, SdpaAttention, InParts, *others


@pairs(
    head_dim=(10, 64),
    heads=[(6, 2), (8, 1)],
    block_size=(5, 16),
    window=(None, 7),
    cap=(None, 0.7),
    dtype=TOLERANCE,
)
def test_every_bias(head_dim, heads, block_size, window, cap, dtype, kernels):
    given = spec(*heads, head_dim, dtype, window, cap=cap)
    q, kv, batch = problem(given, block_size, LENGTHS)
    for bias in biases(given.num_heads, batch):
        exact = exactly(given, q, kv, batch, bias, None)
        for backend in backends(kernels, dtype):
            found = backend(given)(q, in_8_bits(kv), batch, bias, None)
            assert found.dtype is dtype
            assert (found - exact).abs().max() < TOLERANCE[dtype]


@pairs(storage=KeyStorage, head_dim=[16, 40], dtype=TOLERANCE)
def test_every_storage(storage, head_dim, dtype, kernels):
    """Keys are rounded as they are stored, turned or not, and turned from there."""
    given = spec(6, 2, head_dim, dtype)
    q, kv, batch, rope = turned(given, storage, LENGTHS)
    exact = exactly(given, q, kv, batch, None, rope.rotation())
    for backend in backends(kernels, dtype):
        found = backend(given)(q, in_8_bits(kv), batch, None, rope.rotation())
        assert (found - exact).abs().max() < TOLERANCE[dtype]


def turned(given, storage, lengths):
    """A problem at bases with gaps, its queries and keys as the storage has them."""
    q, kv, batch = problem(given, 5, lengths)
    batch = placed(batch, in_order(batch, 5), 5)
    rope = made(storage, given.dtype, **{"width": given.head_dim} | STORAGES[storage])
    q, _ = rope.rotate(q, q, batch.positions, batch.offsets)
    return q, stored(kv, batch, 5, rope), batch, rope


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", KeyStorage)
def test_triton(storage, dtype):
    given = spec(6, 2, 40, dtype)
    q, kv, batch, rope = turned(given, storage, SHORT)
    bias = biases(6, batch)[2]
    exact = exactly(given, q, kv, batch, bias, rope.rotation())
    found = TritonHere(given)(q, in_8_bits(kv), batch, bias, rope.rotation())
    # On a GPU the values are rounded too, before they meet the weights.
    allowed = exact.abs() * torch.finfo(dtype).eps + (2e-5 if DEVICE.type == "cpu" else 0.02)
    assert ((found - exact).abs() <= allowed).all()


@pytest.mark.triton
@pytest.mark.parametrize("bias", range(5))
def test_triton_with_every_bias(bias):
    given = spec(3, 1, 10, window=7)
    q, kv, batch = problem(given, 5, SHORT)
    bias = biases(3, batch)[bias]
    exact = exactly(given, q, kv, batch, bias, None)
    found = TritonHere(given)(q, in_8_bits(kv), batch, bias, None)
    assert (found - exact).abs().max() < 1e-5


def test_an_entry_that_is_not_finite_shows(kernels):
    given = spec()
    q, kv, batch = problem(given, 16, [(40, 1)])
    for part in kv:
        for value in (torch.nan, torch.inf):
            before = part[batch.block_tables[0, 1], 3].clone()
            part[batch.block_tables[0, 1], 3, 1, 2] = value
            for backend in backends(kernels):
                found = backend(given)(q, in_8_bits(kv), batch, None, None)
                assert not found[:, 3:].isfinite().any()  # the query heads of that key head
                assert found[:, :3].isfinite().all()
            part[batch.block_tables[0, 1], 3] = before


def test_the_scale_of_another_head_shows(kernels):
    given = spec()
    q, kv, batch = problem(given, 16, LENGTHS)
    exact = exactly(given, q, kv, batch, None, None)
    right = in_8_bits(kv)
    for name in ("key_scales", "value_scales"):
        wrong = replace(right, **{name: getattr(right, name).roll(1, dims=2)})
        for backend in backends(kernels):
            found = backend(given)(q, wrong, batch, None, None)
            assert (found - exact).abs().max() > 0.01
