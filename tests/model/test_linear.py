"""Packed linear layers against torch, for every row count the kernel treats differently."""

import pytest
import torch

from model.linear import Linear, OneDnnLinear, PanelLinear, pack
from tests.model.conftest import CPU


def made(inputs, outputs, bias, dtype):
    layer = Linear(inputs, outputs, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(inputs)
    layer.weight.copy_(torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
    if bias:
        layer.bias.copy_(torch.randn(outputs, generator=generator))
    return layer


@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 31, 96, 97, 130])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(7, 3, True), (64, 33, False)])
def test_panels_equal_torch(rows, inputs, outputs, bias, kernels):
    layer = made(inputs, outputs, bias, torch.float32)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    exact = torch.nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double() if bias else None
    )
    assert (PanelLinear(layer, kernels)(x) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 13, 40])
def test_bfloat16_panels_round_once(rows, kernels):
    layer = made(96, 70, True, torch.bfloat16)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    packed = PanelLinear(layer, kernels)(x)
    assert (
        torch.equal(packed, exact.float().bfloat16())
        or ((packed.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    )


@pytest.mark.parametrize("rows", [1, 40])
def test_one_dnn_equals_torch(rows):
    layer = made(96, 70, True, torch.bfloat16)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert (OneDnnLinear(layer)(x).double() - exact).abs().max() < 0.04


def test_a_rows_result_does_not_depend_on_the_others(kernels):
    packed = PanelLinear(made(64, 33, False, torch.float32), kernels)
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    together = packed(x)
    for row in (0, 11, 12, 95, 96, 99):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


def test_special_values_survive_bfloat16_storage(kernels):
    layer = made(4, 4, False, torch.bfloat16)
    x = torch.tensor([[1.0, torch.nan, 0, 0], [torch.inf, 0, 0, 0]]).bfloat16()
    packed = PanelLinear(layer, kernels)(x)
    assert packed[0].isnan().all()
    assert packed[1].isinf().all()


def test_pack_replaces_every_linear_and_leaves_float64_alone(kernels):
    model = torch.nn.Sequential(made(4, 4, False, torch.float32))
    pack(model, kernels)
    assert isinstance(model[0], PanelLinear)
    exact = torch.nn.Sequential(made(4, 4, False, torch.float64))
    pack(exact, kernels)
    assert isinstance(exact[0], Linear)
