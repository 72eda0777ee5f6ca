"""Norms and gates in Triton and in torch; on a GPU if there is one, else interpreted."""

import pytest
import torch

from ropewalk.model.kernels.triton import modules
from ropewalk.model.kernels.triton.layers import TritonLayers
from ropewalk.model.kernels.triton.modules import TritonGate
from ropewalk.model.layers.decoder import ACTIVATIONS, Gate, LayerNorm, Layers, RMSNorm
from tests.model.attention.triton_here import DEVICE, drawn

pytestmark = pytest.mark.triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = {
    "rms": lambda width, dtype: RMSNorm(width, 1e-3, dtype, DEVICE),
    "layer": lambda width, dtype: LayerNorm(width, 1e-3, True, dtype, DEVICE),
    "layer without bias": lambda width, dtype: LayerNorm(width, 1e-3, False, dtype, DEVICE),
}


@pytest.fixture(autouse=True)
def triton():
    pytest.importorskip("triton", reason="Triton is not installed")


def close(found, exact, ulps):
    """`exact` is in float64; sums of different orders and one rounding lie between them."""
    epsilon = torch.finfo(found.dtype).eps
    assert (found.double() - exact).abs().max() <= ulps * epsilon * exact.abs().max()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("width", [1, 24, 64, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_after_an_addition_or_without(norm, width, dtype):
    """Of rows far from 0 too, whose mean must not cost LayerNorm its digits."""
    norm = NORMS[norm](width, dtype)
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            parameter.copy_(drawn(width, seed=index))
    exact = NORMS["layer" if isinstance(norm, LayerNorm) else "rms"](width, torch.float64)
    exact.load_state_dict(
        {"bias": torch.zeros(width)} | norm.state_dict()
        if isinstance(norm, LayerNorm)
        else norm.state_dict()
    )
    x, added = drawn(5, width, dtype=dtype, seed=3, scale=4), drawn(5, width, dtype=dtype, seed=4)
    x[1:3] += 100
    # Of the mean 100 some digits are lost before it is subtracted, in float32.
    ulps = 60 if dtype is torch.float32 else 2
    layers = TritonLayers(Layers())
    total, found = layers.add_norm(x, None, norm)
    assert total is x
    close(found, exact(x.double()), ulps)
    before = x.clone(), added.clone()
    total, found = layers.add_norm(x, added, norm)
    # The interpreter cuts bfloat16 off instead of rounding it.
    close(total, (x + added).double(), ulps=0 if dtype is torch.float32 else 1)
    close(found, exact(total.double()), ulps)
    assert torch.equal(x, before[0]) and torch.equal(added, before[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 40])
def test_a_gate(activation, dtype, width, monkeypatch):
    monkeypatch.setattr(modules, "GATES_AT_ONCE", 16)  # so that one row takes several programs
    gate = Gate(activation)
    x = drawn(7, 2 * width, dtype=dtype, scale=3)
    found = TritonGate(gate)(x)
    assert found.dtype is dtype
    close(found, gate(x.double()), ulps=4)  # a GPU's exponential and quotient are off by 2 each


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, from NumPy
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_far_from_zero(activation):
    """Where an exponential overflows, and where something is not a number."""
    x = torch.tensor([[-200.0, 200.0, 1e4, torch.nan, 2.0, 3.0, 5.0, 7.0]], device=DEVICE)
    exact = Gate(activation)(x)
    torch.testing.assert_close(TritonGate(Gate(activation))(x), exact, equal_nan=True)
