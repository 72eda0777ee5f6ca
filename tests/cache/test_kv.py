"""What a cache keeps of keys and values, in the dtype of a model and in 8 bits."""

from dataclasses import replace

import pytest
import torch

from ropewalk.cache.kv import (
    Int8LayerKV,
    KVCache,
    LayerKV,
    bytes_per_entry,
    bytes_per_token,
    restored,
    rounded,
)
from tests.cache.shape import Shape
from tests.model.in_8_bits import by_hand
from tests.model.tiny import CONFIG

HEADS, WIDTH, BLOCK = 2, 6, 4


def cache(dtype):
    return KVCache(
        Shape(2, HEADS, WIDTH), blocks=3, block_size=BLOCK, dtype=dtype, device=torch.device("cpu")
    )


def entries(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS, WIDTH, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_in_8_bits_are_off_by_half_a_scale_at_most(dtype):
    given = entries(500, dtype=dtype) * torch.logspace(-6, 6, 500)[:, None, None].to(dtype)
    numbers, scales = rounded(given)
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert (numbers.abs().amax(-1) == 127).all()
    found = restored(numbers, scales, torch.float64)
    assert torch.equal(found, by_hand(given))
    assert ((found - given).abs() <= scales[..., None] * 0.50001).all()


def test_zeros_and_the_smallest_numbers_stay_finite():
    for value in (0.0, 1e-45, 1e-38, -1e-31):
        found = restored(*rounded(torch.full((3, WIDTH), value)), torch.float32)
        assert ((found - value).abs() <= 1e-30).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_pass_for_a_number(value):
    given = entries(3)
    given[1, 0, 4] = value
    found = restored(*rounded(given), torch.float32)
    assert not found[1, 0].isfinite().any()
    assert found[[0, 2]].isfinite().all() and found[1, 1].isfinite().all()


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, LayerKV), (torch.int8, Int8LayerKV)])
def test_what_was_written_is_read_and_nothing_else_is_touched(dtype, kind):
    kv = cache(dtype)
    for part in kv.whole:
        part.fill_(1)
    layer, k, v = kv.layer(1), entries(2, 1), entries(2, 2)
    assert type(layer) is type(kv.whole) is kind
    given = (k, v) if dtype is torch.int8 else (k.to(dtype), v.to(dtype))
    layer.write(*given, torch.tensor([9, 4]))
    found = layer.read(torch.tensor([2, 1]), torch.tensor([1, 0]), dtype=torch.float64)
    for was, wanted in zip(found, (k, v), strict=True):
        assert ((was - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * 2**-7).all()
    keys, values = layer.read(torch.tensor([[0, 2]]), dtype=torch.float32)
    assert keys.shape == values.shape == (1, 2, BLOCK, HEADS, WIDTH)
    assert (keys == 1).all(dim=(-1, -2)).tolist() == [[[True] * 4, [True, False, True, True]]]
    assert all((part == 1).all() for part in kv.layer(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_keys_of_some_blocks_change_and_values_stay(dtype):
    kv = cache(dtype)
    layer, wide = kv.layer(0), torch.float32 if dtype is torch.int8 else dtype
    layer.write(entries(12, 1, wide), entries(12, 2, wide), torch.arange(12))
    before = layer.read(torch.arange(3), dtype=torch.float64)
    layer.change_keys(torch.tensor([2, 0]), lambda keys: keys * 3)
    keys, values = layer.read(torch.arange(3), dtype=torch.float64)
    assert torch.equal(values, before[1])
    assert torch.equal(keys[1], before[0][1])
    for block in (0, 2):  # the same steps, three times as wide
        assert (keys[block] - 3 * before[0][block]).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 24), (torch.int8, 10)])
def test_bytes_are_those_of_the_tensors(dtype, size):
    kv = cache(dtype)
    assert kv.bytes_per_entry == bytes_per_entry(WIDTH, dtype) == size
    allocated = sum(part.numel() * part.element_size() for part in kv.whole)
    assert allocated == kv.bytes_per_token * 3 * BLOCK


def test_bytes_per_token():
    size = 2 * 3 * 2 * 8 * 4  # keys and values, layers, key heads, head_dim, float32
    assert bytes_per_token(CONFIG, torch.float32) == size
    assert bytes_per_token(CONFIG, torch.bfloat16) == size // 2
    # With a float32 scale for each of the heads.
    assert bytes_per_token(CONFIG, torch.int8) == size // 4 + 2 * 3 * 2 * 4
    assert bytes_per_token(replace(CONFIG, num_layers=6), torch.float32) == 2 * size
