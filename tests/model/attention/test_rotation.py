"""Keys in every storage, at any bases, meet queries as if both were turned at their positions."""

import random
from dataclasses import replace

import torch

from ropewalk.cache.kv import LayerKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.base import TableBias
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.encodings.common.rope_scaling import scaling_from
from ropewalk.model.encodings.common.rotary import Rotation
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.attention import CpuBackend
from tests.model.attention.test_cpu import InParts, problem, spec
from tests.model.running import CPU
from tests.model.tiny import YARN, WideRoPE
from tests.products import pairs

CONTEXT = 300
# Requests of one row and of several, in the kernel's path for few queries and in that for many.
LENGTHS = [(0, 9), (70, 1), (17, 4), (0, 1), (40, 30)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}


def in_order(batch, block_size):
    """Bases as after evictions and shifts: ascending, with gaps, off the blocks' borders."""
    rng = random.Random(3)
    rows = []
    for _ in range(len(batch.block_bases)):
        at, row = rng.randrange(7), []
        for _ in range(batch.block_bases.shape[1]):
            row.append(at)
            at += block_size + rng.choice([0, 0, 1, 5])
        rows.append(row)
    return torch.tensor(rows)


def shuffled(batch, block_size):
    """Later blocks at earlier positions, so that keys stand after the queries that see them."""
    rng = random.Random(4)
    return torch.stack(
        [row[rng.sample(range(len(row)), len(row))] for row in in_order(batch, block_size)]
    )


def placed(batch, bases, block_size):
    """The batch with other bases, and every new token where its block says."""
    counts = batch.query_starts.diff()
    request = torch.arange(len(counts)).repeat_interleave(counts)
    row = torch.arange(len(request)) - batch.query_starts[request]
    index = (batch.context_lens - counts)[request] + row
    positions = bases[request, index // block_size] + index % block_size
    assert bases.max() + block_size <= CONTEXT
    return replace(batch, positions=positions, block_bases=bases)


def by_hand(x, positions, rope):
    """x [T, heads, head_dim] float64 turned as complex numbers, at positions [T]."""
    width = rope.width
    halves = rope.layout == "half"
    first = range(width // 2) if halves else range(0, width, 2)
    second = range(width // 2, width) if halves else range(1, width, 2)
    angles = positions[:, None, None].double() * rope.frequencies.double()
    turned = torch.complex(x[..., list(first)], x[..., list(second)])
    turned = turned * torch.polar(torch.full_like(angles, rope.magnitude), angles)
    y = x.clone()
    y[..., list(first)], y[..., list(second)] = turned.real, turned.imag
    return y


def everywhere(batch, block_size):
    """Position and offset of every slot of the cache that holds a key, by block; 0 elsewhere."""
    blocks = int(batch.block_tables.max()) + 1
    positions = torch.zeros(blocks, block_size, dtype=torch.int64)
    offsets = torch.arange(block_size).repeat(blocks, 1)
    for table, bases, context in zip(
        batch.block_tables, batch.block_bases, batch.context_lens, strict=True
    ):
        used = -(-int(context) // block_size)
        positions[table[:used]] = bases[:used, None] + torch.arange(block_size)
    return positions, offsets


def stored(kv, batch, block_size, rope):
    """The keys of a cache as the encoding stores them, each at its position and offset."""
    positions, offsets = everywhere(batch, block_size)
    keys = kv.keys[: len(positions)].flatten(0, 1)
    _, turned = rope.rotate(keys, keys, positions.flatten(), offsets.flatten())
    return LayerKV(turned.view_as(kv.keys), kv.values)


def made(storage, dtype=torch.float64, **changes):
    options = {"base": 100.0, "width": 64, "layout": "half", "context": CONTEXT, "device": CPU}
    kind = WideRoPE if dtype is torch.float64 else RoPE
    return kind(**options | changes, storage=storage)


def expected(given, q, kv, batch, bias, rope, block_size):
    """Everything turned by hand, in float64, and an attention that turns nothing."""
    positions, _ = everywhere(batch, block_size)
    wide = LayerKV(*(cache.double() for cache in kv))
    keys = by_hand(wide.keys[: len(positions)].flatten(0, 1), positions.flatten(), rope)
    wide = LayerKV(keys.view_as(wide.keys), wide.values)
    exact = ReferenceAttention(replace(given, dtype=torch.float64))
    return exact(by_hand(q.double(), batch.positions, rope), wide, batch, bias, None)


def backends(kernels):
    return ReferenceAttention, SdpaAttention, InParts, CpuBackend(kernels)


TURNINGS = {
    "64": (64, {}),
    "64-interleaved": (64, {"layout": "interleaved", "width": 24}),
    "80-scaled": (80, {"scaling": scaling_from(YARN), "width": 80}),
    "10-scaled": (10, {"width": 6, "scaling": scaling_from(YARN)}),
    "10-interleaved": (10, {"width": 10, "layout": "interleaved"}),
}
ORDERS = {"in order": in_order, "shuffled": shuffled}


@pairs(
    storage=KeyStorage,
    turning=TURNINGS,
    heads=[(2, 2), (6, 2), (8, 1)],
    block_size=[1, 5, 16],
    order=ORDERS,
)
def test_every_storage_equals_turning_by_hand(storage, turning, heads, block_size, order, kernels):
    (head_dim, turning), bases = TURNINGS[turning], ORDERS[order]
    given = spec(*heads, head_dim, torch.float64)
    q, kv, batch = problem(given, block_size, LENGTHS)
    batch = placed(batch, bases(batch, block_size), block_size)
    rope = made(storage, **turning)
    exact = expected(given, q, kv, batch, None, rope, block_size)
    kv = stored(kv, batch, block_size, rope)
    q, _ = rope.rotate(q, q, batch.positions, batch.offsets)
    for backend in backends(kernels):
        found = backend(given)(q, kv, batch, None, rope.rotation())
        assert (found - exact).abs().max() <= TOLERANCE[torch.float64]


@pairs(
    storage=KeyStorage,
    dtype=[torch.float32, torch.bfloat16],
    layout=["half", "interleaved"],
    causal=[True, False],
    window=[None, 7],
)
def test_narrower_numbers_windows_and_both_ways(storage, dtype, layout, causal, window, kernels):
    given = spec(6, 2, 64, dtype, window, causal)
    q, kv, batch = problem(given, 16, LENGTHS)
    batch = placed(batch, in_order(batch, 16), 16)
    bias = TableBias(torch.randn(6, 9, generator=torch.Generator().manual_seed(2)), zero=2)
    rope = made(storage, dtype, layout=layout, scaling=scaling_from(YARN))
    exact = expected(given, q, kv, batch, bias, rope, 16)
    kv = stored(kv, batch, 16, rope)
    q, _ = rope.rotate(q, q, batch.positions, batch.offsets)
    for backend in backends(kernels):
        found = backend(given)(q, kv, batch, bias, rope.rotation())
        assert (found - exact).abs().max() <= TOLERANCE[dtype]


def test_unused_slots_may_lie_past_the_table(kernels):
    """The first request is the shorter, and its only block ends after the last position."""
    given = spec(2, 1, 64, torch.float64)
    q, kv, batch = problem(given, 16, [(3, 1), (35, 1)])
    batch = placed(batch, torch.tensor([[32, 0, 0], [0, 16, 32]]), 16)
    for storage in (KeyStorage.RAW, KeyStorage.BLOCK):
        whole = made(storage).rotation()
        tight = Rotation(whole.cos[:36], whole.sin[:36], whole.layout, storage)
        for backend in backends(kernels):
            attend = backend(given)
            found, wanted = (attend(q, kv, batch, None, each) for each in (tight, whole))
            assert torch.equal(found, wanted)
            assert not found.isnan().any()
