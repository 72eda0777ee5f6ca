"""Linear layers for few rows, by Triton and exactly; on a GPU if there is one, else interpreted."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from ropewalk.model.kernels.triton import launches
from ropewalk.model.kernels.triton.launches import (
    FEW_ROWS,
    OUTPUTS_AT_ONCE,
    TritonLinear,
    TritonNorm,
)
from ropewalk.model.layers.executor import ACTIVATIONS
from ropewalk.model.program import Norm
from ropewalk.model.weights.quantize import Int8
from tests.model.attention.triton_here import drawn
from tests.products import pairs

pytestmark = pytest.mark.triton

EPS = 1e-3
SIZES = [(24, 40), (300, 17), (1, 1), (512, 64)]  # inputs and outputs: of no tile, and of several


@dataclass(frozen=True)
class Layer:
    weight: torch.Tensor | Int8
    bias: torch.Tensor | None

    def in_triton(self):
        return TritonLinear(self.weight, self.bias)


def linear(inputs, outputs, dtype=torch.float32, bias=True, in_8_bits=False):
    weight = drawn(outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    of_each = drawn(outputs, dtype=dtype, seed=2) if bias else None
    return Layer(Int8.of(weight) if in_8_bits else weight, of_each)


def normed(width, dtype=torch.float32):
    return TritonNorm(Norm("", "", "", width, EPS), drawn(width, dtype=dtype, seed=3), None)


@dataclass
class Exactly:
    """In float64, from the literature's formulas."""

    linear: Layer

    def __call__(self, x, *, norm=None, activation=None, gated=False, added=None):
        x = x.double()
        if norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + norm.op.eps).sqrt() * norm.weight.double()
        weight = self.linear.weight
        if isinstance(weight, Int8):
            weight = weight.rounded.double() * weight.scale.double()[:, None]
        weight = weight.double()
        bias = None if self.linear.bias is None else self.linear.bias.double()
        y = F.linear(x, weight, bias)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = ACTIVATIONS[activation](gate) * up
        elif activation is not None:
            y = ACTIVATIONS[activation](y)
        return y if added is None else y + added.double()


def check(of, x, **more):
    found = of.in_triton()(x, **more)
    exact = Exactly(of)(x, **more)
    assert (found.dtype, found.shape) == (x.dtype, exact.shape)
    # Sums are float32. Of a norm's products with its weights each is rounded, and the sum is.
    roundings = 32 if x.dtype is torch.float32 else 4
    allowed = roundings * torch.finfo(x.dtype).eps * max(1, exact.abs().max())
    assert (found.double() - exact).abs().max() <= allowed


@pairs(
    size=SIZES,
    dtype=[torch.float32, torch.bfloat16],
    in_8_bits=[False, True],
    rows=[1, 3, FEW_ROWS],
)
def test_products(size, dtype, in_8_bits, rows):
    inputs, outputs = size
    x = drawn(rows, inputs, dtype=dtype, scale=3)
    for bias in (True, False):
        check(linear(inputs, outputs, dtype, bias, in_8_bits), x)


@pairs(gated=[False, True], activation=ACTIVATIONS, in_8_bits=[False, True])
def test_what_stands_before_and_after(activation, gated, in_8_bits):
    inputs, outputs = 300, 20
    x = drawn(3, inputs, scale=3)
    of = linear(inputs, 2 * outputs if gated else outputs, in_8_bits=in_8_bits)
    added = drawn(3, outputs, seed=4)
    for norm in (None, normed(inputs)):
        for residual in (None, added):
            check(of, x, norm=norm, activation=activation, gated=gated, added=residual)
            check(of, x, norm=norm, added=None if gated else residual)


def test_a_residual_alone():
    check(linear(24, 40), drawn(3, 24), added=drawn(3, 40, seed=5))


def test_in_bfloat16_all_at_once():
    x = drawn(2, 300, dtype=torch.bfloat16, scale=3)
    added = drawn(2, 20, dtype=torch.bfloat16, seed=4)
    norm = normed(300, torch.bfloat16)
    of = linear(300, 40, torch.bfloat16)
    check(of, x, norm=norm, activation="silu", gated=True, added=added)


@pytest.mark.parametrize("far", [1e-4, 1e4])
def test_norms_of_small_and_large_rows(far):
    check(linear(300, 17), drawn(3, 300, scale=far), norm=normed(300))


def test_tiles_of_twice_as_many_outputs(monkeypatch):
    monkeypatch.setattr(launches, "MANY_PROGRAMS", 2)
    check(linear(24, 4 * OUTPUTS_AT_ONCE + 3), drawn(3, 24))


def test_rows_change_no_bit_of_others():
    of, x = linear(300, 17).in_triton(), drawn(FEW_ROWS, 300)
    together = of(x, norm=normed(300))
    for row in range(FEW_ROWS):
        assert torch.equal(of(x[row : row + 1], norm=normed(300))[0], together[row])


def test_not_a_number_stays_in_its_row():
    x = drawn(3, 24)
    x[1, 5] = torch.nan
    found = linear(24, 40).in_triton()(x, norm=normed(24), activation="relu")
    assert found.isnan().all(-1).tolist() == [False, True, False]
    assert found[[0, 2]].isfinite().all()
