"""Weights in 8 and 4 bits: near the given ones, and nothing else rounded."""

import gguf
import numpy as np
import pytest
import torch

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.layers.executor import linear
from ropewalk.model.program import quantized, shapes_of
from ropewalk.model.weights.quantize import (
    GROUP,
    ROUNDED_AT_ONCE,
    Int4,
    Int8,
    round_matrices,
    rounded_groups,
    rounded_rows,
)
from tests.model.running import run_uncached
from tests.model.tiny import in_torch, program_of, tiny


def test_rows_are_within_half_a_step() -> None:
    matrix = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-6], [1.0], [30.0], [0.0], [1.0], [1e4], [1.0]]
    )
    packed, scale = rounded_rows(matrix)
    assert packed.dtype == torch.int8
    error = (packed.float() * scale[:, None] - matrix).abs()
    assert (error <= scale[:, None] * 0.5001).all()
    assert torch.equal(scale[:3] * 127, matrix[:3].abs().amax(dim=1))


def test_large_matrices_are_rounded_row_by_row_and_left_as_they_are() -> None:
    rows = 2 * ROUNDED_AT_ONCE // 700 + 3
    matrix = torch.randn(rows, 700, generator=torch.Generator().manual_seed(2))
    before = matrix.clone()
    packed, scale = rounded_rows(matrix)
    for row in (0, 1, ROUNDED_AT_ONCE // 700 - 1, ROUNDED_AT_ONCE // 700, rows - 1):
        alone, of_row = rounded_rows(matrix[row : row + 1])
        assert torch.equal(packed[row], alone[0])
        assert scale[row] == of_row
    assert torch.equal(matrix, before)


def test_the_rounded_weights_are_multiplied_exactly() -> None:
    drawn = torch.Generator().manual_seed(1)
    weight = torch.randn(9, 40, generator=drawn).double()
    bias = torch.randn(9, generator=drawn).double()
    rounded, scale = rounded_rows(weight)
    x = torch.randn(5, 40, generator=drawn, dtype=torch.float64)
    expected = x @ (rounded.double() * scale.double()[:, None]).T + bias
    assert (linear(x, Int8.of(weight), bias) - expected).abs().max() < 1e-5  # scales are float32


def test_sums_fit_where_the_answer_fits() -> None:
    """127 · 200 · 64 is more than float16 holds."""
    weight = torch.tensor([[0.05], [-3.0], [1e-4]]).expand(3, 64).half()
    x = torch.full((2, 64), 200.0, dtype=torch.float16)
    exact = x.double() @ weight.double().T
    assert ((linear(x, Int8.of(weight), None) - exact).abs() <= 2e-3 * exact.abs()).all()


def test_every_linear_layer_is_rounded_and_the_model_computes_nearly_the_same() -> None:
    decoder = tiny("rope", ReferenceAttention, torch.float32)
    tokens = list(range(30))
    before = run_uncached(decoder, tokens)
    program = quantized(program_of(decoder))
    matrices = matrices_of(program)
    assert matrices and all(isinstance(each, Int8) for each in matrices.values())
    after = run_uncached(in_torch(program), tokens)
    assert 0 < (after - before).square().mean().sqrt() < 0.1 * before.std()


def matrices_of(program):
    """Those of linear layers, by name."""
    names = (name for name, shape in shapes_of(program.ops).items() if len(shape) == 2)
    return {name: program.weights[name] for name in names if name != "embed.weight"}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_a_file(kind):
    """[48, 256] as such a GGUF file has them."""
    if kind == "Q4_K":  # a scale and a least of 6 bits each, times float16 for 256 weights
        numbers = torch.randint(16, (48, 8, 32), generator=torch.Generator().manual_seed(1))
        numbers[:, ::2] = numbers[:, ::2].clamp(2, 12)  # which need not come to both ends
        scales, leasts = (torch.randint(1, 64, (48, 8, 1)) for _ in range(2))
        return (numbers * (scales * 0.001) - leasts * 0.009).flatten(1)
    kind = gguf.GGMLQuantizationType[kind]
    values = gguf.quants.quantize(drawn(48, 256).numpy() * np.float32(0.05), kind)
    return torch.from_numpy(gguf.quants.dequantize(values, kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_weights_of_a_file_in_4_bits_are_found_again(kind):
    weight = of_a_file(kind)
    step = rounded_groups(weight).scales.float().repeat_interleave(GROUP, dim=1)
    error = (rounded_groups(weight).widened() - weight).abs()
    assert (error <= 0.02 * step + 2**-11 * weight.abs()).all()  # how float16 rounds both
    rounded = weight.bfloat16()
    lost = (rounded_groups(rounded).widened() - weight).norm()
    assert lost < 2 * (rounded.float() - weight).norm()


@pytest.mark.parametrize("columns", [1, 20, 32, 45, 200])
def test_any_weight_is_within_half_a_step(columns):
    weight = drawn(9, columns) * torch.logspace(-3, 3, 9)[:, None]
    weight[4] = 0.75
    groups = rounded_groups(weight)
    assert groups.numbers.shape == weight.shape
    assert groups.numbers.dtype == torch.uint8
    assert groups.numbers.max() <= 15
    step = groups.scales.float().repeat_interleave(GROUP, dim=1)[:, :columns]
    assert ((groups.widened() - weight).abs() <= 0.52 * step + 2**-10 * weight.abs()).all()
    assert torch.equal(groups.widened()[4], weight[4])


def test_4_bits_are_for_layers_that_lose_nothing_by_them():
    decoder = tiny("rope", ReferenceAttention, torch.float32)
    fitting = {"layers.1.mlp.down.weight", "layers.2.attention.out.weight"}
    for name in fitting:
        weight = program_of(decoder).weights[name]
        weight.copy_(rounded_groups(weight).widened())
    tokens = list(range(30))
    before = run_uncached(decoder, tokens)
    program = quantized(program_of(decoder), 4)
    for name, weight in matrices_of(program).items():
        assert isinstance(weight, Int4 if name in fitting else Int8)
    after = run_uncached(in_torch(program), tokens)
    assert 0 < (after - before).square().mean().sqrt() < 0.1 * before.std()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, 1e5, 1e-7])
def test_what_float16_does_not_hold_is_not_put_into_4_bits(odd):
    weights = {"it": odd * (torch.arange(128).view(2, 64) % 16 + 1).float()}
    assert isinstance(round_matrices(weights, ["it"], 4)["it"], Int8)


def test_weights_in_4_bits_are_multiplied_exactly():
    weight, bias = drawn(9, 40).double(), drawn(9, seed=1).double()
    groups, x = rounded_groups(weight), drawn(5, 40, seed=2).double()
    numbers = groups.numbers.double()
    expected = bias.expand(5, 9).clone()
    for first in (0, 32):
        each = slice(first, first + 32)
        widened = (
            numbers[:, each] * groups.scales[:, [first // 32]] + groups.leasts[:, [first // 32]]
        )
        expected += x[:, each] @ widened.T
    assert (linear(x, groups, bias) - expected).abs().max() < 1e-5
