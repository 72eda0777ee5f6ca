"""Norms and gates in Triton and in torch; on a GPU if there is one, else interpreted."""

import pytest
import torch

from ropewalk.model.kernels.triton import launches
from ropewalk.model.kernels.triton.launches import TritonGate, TritonNorm
from ropewalk.model.layers.executor import ACTIVATIONS, norm
from ropewalk.model.program import Norm
from tests.model.attention.triton_here import DEVICE, drawn
from tests.products import pairs

pytestmark = pytest.mark.triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = {  # whether rows are centred, and whether there is a bias
    "rms": (False, False),
    "layer": (True, True),
    "layer without bias": (True, False),
}


def close(found, exact, ulps):
    """`exact` is in float64; sums of different orders and one rounding lie between them."""
    epsilon = torch.finfo(found.dtype).eps
    assert (found.double() - exact).abs().max() <= ulps * epsilon * exact.abs().max()


@pairs(kind=NORMS, width=[1, 24, 64, 130], dtype=DTYPES)
def test_a_norm_after_an_addition_or_without(kind, width, dtype):
    """Of rows far from 0 too, whose mean must not cost LayerNorm its digits."""
    op = Norm("x", "n", "it", width, 1e-3, *NORMS[kind])
    weight = drawn(width, dtype=dtype, seed=0)
    bias = drawn(width, dtype=dtype, seed=1) if op.bias else None
    wide = None if bias is None else bias.double()

    def exact(x):
        return norm(op, weight.double(), wide, x)

    x, added = drawn(5, width, dtype=dtype, seed=3, scale=4), drawn(5, width, dtype=dtype, seed=4)
    x[1:3] += 100
    # Of the mean 100 some digits are lost before it is subtracted, in float32.
    ulps = 60 if dtype is torch.float32 else 2
    in_triton = TritonNorm(op, weight, bias)
    total, found = in_triton(x)
    assert total is x
    close(found, exact(x.double()), ulps)
    before = x.clone(), added.clone()
    total, found = in_triton(x, added)
    # The interpreter cuts bfloat16 off instead of rounding it.
    close(total, (x + added).double(), ulps=0 if dtype is torch.float32 else 1)
    close(found, exact(total.double()), ulps)
    assert torch.equal(x, before[0]) and torch.equal(added, before[1])


def gated(activation):
    def gate(x):
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    return gate


@pairs(activation=ACTIVATIONS, dtype=DTYPES, width=[1, 40])
def test_a_gate(activation, dtype, width, monkeypatch):
    monkeypatch.setattr(launches, "GATES_AT_ONCE", 16)  # so that one row takes several programs
    gate = gated(activation)
    x = drawn(7, 2 * width, dtype=dtype, scale=3)
    found = TritonGate(activation)(x)
    assert found.dtype is dtype
    close(found, gate(x.double()), ulps=4)  # a GPU's exponential and quotient are off by 2 each


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from NumPy
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_far_from_zero(activation):
    """Where an exponential overflows, and where something is not a number."""
    x = torch.tensor([[-200.0, 200.0, 1e4, torch.nan, 2.0, 3.0, 5.0, 7.0]], device=DEVICE)
    exact = gated(activation)(x)
    torch.testing.assert_close(TritonGate(activation)(x), exact, equal_nan=True)
