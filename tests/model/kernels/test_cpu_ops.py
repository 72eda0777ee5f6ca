"""Every op of the CPU's kernels against torch, and linear layers for each row count treated
differently."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ropewalk.cache.kv import KVCache, restored, rounded
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.bindings import has_bf16_arithmetic
from ropewalk.model.kernels.cpu.executor import CpuExecutor
from ropewalk.model.kernels.cpu.lowering import Fused, pack
from ropewalk.model.layers.executor import ACTIVATIONS, norm
from ropewalk.model.program import Embed, Linear, Norm, Program, Rotate, Scale, quantized
from ropewalk.model.weights.quantize import Int4, Int8
from tests.model.few_bits import BITS, in_bits
from tests.model.running import Running, make_batch, run_uncached
from tests.model.tiny import CONFIG, CPU, ENCODINGS, on_kernels, program_of, tiny
from tests.products import pairs

DTYPES = [torch.float32, torch.bfloat16]


def computed(x, ops, weights, kernels, positions=None):
    """What the last of the ops makes of x [T, width], the value "x", as "logits"."""
    rows, width = x.shape
    embed = Embed("", "x", "embed", rows, width)
    weights = {"embed.weight": x, **weights}
    program = Program(CONFIG, (embed, *ops), (), weights, PositionalEncoding())
    blocks = list(range(1, 2 + rows // 16))
    batch = make_batch([(Running(list(range(rows)), blocks), rows)], 16)
    if positions is not None:
        batch = replace(batch, positions=positions)
    kv = KVCache(CONFIG, blocks=1, block_size=16, dtype=x.dtype, device=CPU)
    return CpuExecutor(program, kernels)(batch, kv)


@dataclass(frozen=True)
class Layer:
    """Of a linear layer; the weight may be rounded."""

    weight: object
    bias: object


@dataclass(frozen=True)
class Panels:
    """The layer on the kernels, perhaps with an activation; gated, of half of its outputs."""

    layer: Layer
    kernels: object
    activation: object = None
    gated: bool = False

    def __call__(self, x):
        weight, bias = self.layer.weight, self.layer.bias
        outputs, inputs = weight.shape
        op = Linear("x", "logits", "it", inputs, (outputs,), bias is not None)
        if self.activation is not None:
            op = Fused("x", "logits", op, self.activation, self.gated)
        return computed(x, [op], {"it.weight": weight, "it.bias": bias}, self.kernels)

    @property
    def panels(self):
        return pack(self.layer.weight, None, self.kernels)[1]["panels"]


def of_bits(layer, bits, kernels):
    return replace(layer, weight=in_bits(layer.weight, bits, kernels))


def made(inputs, outputs, bias, dtype):
    generator = torch.Generator().manual_seed(inputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    of_each = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    return Layer(weight, of_each)


@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 31, 96, 97, 130])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(7, 3, True), (64, 33, False)])
def test_panels_equal_torch(rows, inputs, outputs, bias, kernels):
    layer = made(inputs, outputs, bias, torch.float32)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    exact = torch.nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double() if bias else None
    )
    assert (Panels(layer, kernels)(x) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 3, 13, 40, 97])
@pytest.mark.parametrize("inputs", [1, 7, 96, 601])  # with odd ones, the last has no second
def test_bfloat16_panels_round_once(inputs, rows, kernels):
    layer = made(inputs, 70, True, torch.bfloat16)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    packed = Panels(layer, kernels)(x)
    assert (
        torch.equal(packed, exact.float().bfloat16())
        or ((packed.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    )


@pairs(spread=[0, 1, 100], inputs=[4, 70, 601], rows=[1, 2, 7, 12, 13, 70, 601])
def test_no_bit_of_a_bfloat16_weight_is_lost(spread, inputs, rows, kernels):
    """Whatever their sizes are: at 0 all are near 1, at 100 they go from 1e-30 to 1e30."""
    generator = torch.Generator().manual_seed(spread)
    sizes = 2.0 ** (torch.rand(70, inputs, generator=generator) * 2 - 1).mul(spread)
    layer = made(inputs, 70, False, torch.bfloat16)
    layer.weight.copy_(torch.randn(70, inputs, generator=generator) * sizes)
    layer.weight[torch.rand(70, inputs, generator=generator) < 0.1] = 0
    picked = torch.randint(inputs, (rows,), generator=generator)
    x = F.one_hot(picked, inputs).bfloat16()
    assert torch.equal(Panels(layer, kernels)(x), layer.weight.T[picked])


@pytest.mark.skipif(
    not has_bf16_arithmetic() or "CXX" in os.environ,
    reason="this processor does not multiply bfloat16, or the compiler may be told not to",
)
def test_a_bfloat16_weight_takes_12_bits(kernels):
    layer = made(576, 1536, False, torch.bfloat16)
    assert Panels(layer, kernels).panels.nbytes * 8 < 12.2 * layer.weight.numel()


def test_a_weight_in_4_bits_takes_5(kernels):
    """With the group's scale and least."""
    layer = made(576, 1536, False, torch.bfloat16)
    packed = Panels(of_bits(layer, 4, kernels), kernels)
    assert packed.panels.nbytes * 8 == 5 * layer.weight.numel()


GROUP = 32  # inputs that integers.hpp rounds together


def in_8_bits(x):
    """float64 [rows, inputs], as integers.hpp takes them."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return restored(*rounded(groups), torch.float64).flatten(1)[:, : x.shape[1]]


def exact_sums(layer, x):
    """float64, as the layer may compute them: with few bits, inputs may be rounded, too."""
    match layer.weight:
        case Int8() as weight:
            weight = weight.rounded.double() * weight.scale.double()[:, None]
            inputs = [x.double(), in_8_bits(x)]
        case Int4() as weight:
            weight, inputs = weight.widened().double(), [in_8_bits(x)]
        case weight:
            weight, inputs = weight.double(), [x.double()]
    bias = 0.0 if layer.bias is None else layer.bias.double()
    return [given @ weight.T + bias for given in inputs]


@pairs(
    bits=[8, 4],
    shape=[(7, 3, True), (64, 70, True), (600, 33, False)],  # inputs, outputs, bias
    rows=[1, 2, 6, 7, 12, 13, 40, 97],
    dtype=DTYPES,
)
def test_panels_of_few_bits_round_inputs_in_groups_or_not_at_all(bits, rows, shape, dtype, kernels):
    """In groups where the processor multiplies 8-bit integers, and nowhere just some of them."""
    layer = of_bits(made(*shape, dtype), bits, kernels)
    x = torch.randn(rows, shape[0], generator=torch.Generator().manual_seed(rows)).to(dtype)
    found = Panels(layer, kernels)(x).double()
    rounding = 2**-8 if dtype is torch.bfloat16 else 0.0
    exact = exact_sums(layer, x)
    assert any(((found - y).abs() <= y.abs() * rounding + 1e-5).all() for y in exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_of_few_bits_keep_what_is_not_finite_to_its_row(bits, kernels):
    layer = Panels(of_bits(made(64, 40, False, torch.bfloat16), bits, kernels), kernels)
    x = torch.randn(14, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = layer(x)
    x[3, 5], x[12, 40] = torch.nan, torch.inf
    after = layer(x)
    assert not after[[3, 12]].isfinite().any()
    others = [row for row in range(14) if row not in (3, 12)]
    assert torch.equal(after[others], before[others])


# A single row meets some outputs at once.
@pairs(
    outputs=[5, 32, 33, 70, 100, 200],
    bits=BITS,
    bias=[False, True],
    dtype=DTYPES,
    count=[1, 2, 3],
)
def test_a_rows_result_does_not_depend_on_the_others(
    outputs, bits, bias, dtype, count, threads, kernels
):
    threads(count)
    layer = made(64, outputs, bias, dtype)
    packed = Panels(of_bits(layer, bits, kernels), kernels)
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = packed(x)
    for row in (0, 11, 12, 49, 50, 95, 96, 149):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


def test_special_values_survive_bfloat16_storage(kernels):
    layer = made(4, 4, False, torch.bfloat16)
    x = torch.tensor([[1.0, torch.nan, 0, 0], [torch.inf, 0, 0, 0]]).bfloat16()
    packed = Panels(layer, kernels)
    for rows in (packed(x), torch.cat([packed(row[None]) for row in x])):
        assert rows[0].isnan().all()
        assert rows[1].isinf().all()


@pairs(
    shape=[(1, 24), (5, 3, 7), (40, 64), (3, 600)],
    kind=["rms", "layer", "layer-with-bias"],
    dtype=DTYPES,
)
def test_norms_equal_torch(shape, kind, dtype, kernels):
    width, generator = shape[-1], torch.Generator().manual_seed(1)
    op = Norm("x", "logits", "it", width, 1e-5, kind != "rms", kind == "layer-with-bias")
    drawn = {name: torch.rand(width, generator=generator) + 0.5 for name in ("weight", "bias")}
    weights = {f"it.{name}": each.to(dtype) for name, each in drawn.items()}
    x = (torch.randn(shape, generator=generator) * 3 + 2).to(dtype)
    x = x.view(shape[0], -1)  # norms over parts of a row are those of heads
    found = computed(x, [op], weights, kernels)
    wide = {name: each.double() for name, each in weights.items()}
    bias = wide["it.bias"] if op.bias else None
    close(found, norm(op, wide["it.weight"], bias, x.double()))


@pairs(
    rows=[1, 2, 7, 12, 13, 50],
    shape=[(40, 37, True), (600, 64, False)],  # inputs, half of the outputs, bias
    activation=ACTIVATIONS,
    bits=BITS,
    dtype=DTYPES,
)
def test_activated_panels_equal_torch(rows, shape, activation, bits, dtype, kernels):
    """Of plain layers, and of gates."""
    inputs, width, bias = shape
    layer = of_bits(made(inputs, 2 * width, bias, dtype), bits, kernels)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    sums, act = exact_sums(layer, x), ACTIVATIONS[activation]
    plain = Panels(layer, kernels, activation)(x)
    assert any(is_close(plain, act(y)) for y in sums)
    gated = Panels(layer, kernels, activation, gated=True)(x)
    halves = [y.chunk(2, dim=-1) for y in sums]
    assert any(is_close(gated, act(gate) * up) for gate, up in halves)


# Part of a strip, and a whole one.
@pairs(width=[1, 16], activation=ACTIVATIONS, dtype=DTYPES)
def test_activations_of_any_size(width, activation, dtype, kernels):
    layer = Layer(torch.ones(2 * width, 1, dtype=dtype), None)
    x = torch.cat([torch.linspace(-120, 120, 97), torch.linspace(-6, 6, 97)])[:, None].to(dtype)
    exact = ACTIVATIONS[activation](x.double())
    close(Panels(layer, kernels, activation)(x), exact.expand(-1, 2 * width))
    close(Panels(layer, kernels, activation, gated=True)(x), (exact * x.double()).expand(-1, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_what_is_not_finite(activation, dtype, kernels):
    layer = Layer(torch.ones(32, 1, dtype=dtype), None)
    found = Panels(layer, kernels, activation)(
        torch.tensor([[torch.nan], [torch.inf]], dtype=dtype)
    )
    assert found[0].isnan().all()
    assert (found[1] == torch.inf).all()


@pairs(width=[4, 10], layout=["half", "interleaved"], dtype=DTYPES)
def test_rope_equals_torch(width, layout, dtype, kernels):
    rope = RoPE(base=100.0, width=width, layout=layout, context=50, device=CPU)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(6, 50, generator=generator).to(dtype)
    positions = torch.tensor([0, 49, 3, 3, 17, 1])
    heads = qkv.view(6, 5, 10).double()
    exact = rope.rotate(heads[:, :3], heads[:, 3:], positions, positions % 16)
    # Columns of one value, as the decoder has them.
    split = Linear("x", "q k", "split", 50, (30, 20))
    for name, expected in zip("qk", exact, strict=True):
        ops = [split, Rotate("q k", "q k", 10, rope), Scale(name, "logits", 1.0)]
        turned = computed(qkv, ops, {"split.weight": torch.eye(50).to(dtype)}, kernels, positions)
        close(turned, expected.flatten(1))


class TwoHalves(PositionalEncoding):
    """Each half of a head turns by itself: what RoPE gets are parts of vectors."""

    @classmethod
    def create(cls, options, config, context, device):
        made, width = cls(), config.head_dim // 2
        made.parts = nn.ModuleList(
            RoPE(base=base, width=width, layout="half", context=context, device=device)
            for base in (10.0, 100.0)
        )
        made.unused = nn.Linear(8, 8).requires_grad_(False)
        return made

    def rotate(self, q, k, positions, offsets):
        halves = zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        turned = [
            rope.rotate(*half, positions, offsets)
            for rope, half in zip(self.parts, halves, strict=True)
        ]
        return tuple(torch.cat(parts, dim=-1) for parts in zip(*turned, strict=True))


def test_what_an_encoding_holds_is_left_to_it(kernels, monkeypatch):
    monkeypatch.setitem(ENCODINGS, "halves", EncodingSpec(f"{__name__}:TwoHalves", {}))
    decoder, tokens = tiny("halves", dtype=torch.float32), list(range(40))
    before = run_uncached(decoder, tokens)
    unused = decoder.encoding.unused.weight.clone()
    program = quantized(program_of(decoder))
    after = run_uncached(on_kernels(decoder, kernels), tokens)
    assert (after - before).abs().max() < 1e-4
    assert torch.equal(decoder.encoding.unused.weight, unused)
    assert not any("unused" in name for name in program.weights)


def close(result, exact):
    assert is_close(result, exact)


def is_close(result, exact):
    """Within one rounding of the result's dtype."""
    step = 2**-8 if result.dtype is torch.bfloat16 else 2**-20
    return ((result.double() - exact).abs() <= exact.abs() * step + 1e-5).all()
