"""Linear layers whose weights have few bits, for tests of the kernels that multiply them."""

import pytest
from torch import nn

from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.layers.linear import (
    AnyLinear,
    Int4Linear,
    Int8Linear,
    Linear,
    quantize,
    rounded_groups,
)

BITS = [16, 8, 4]  # 16: as they are


def in_bits(layer: Linear, bits: int, kernels: Kernels) -> AnyLinear:
    """Quantise, whatever that loses. Skips the test if no kernel multiplies 4-bit weights."""
    if bits == 16:
        return layer
    if bits == 8:
        return Int8Linear(layer)
    if not kernels.multiplies_int4():
        pytest.skip("this processor does not multiply 8-bit integers, or the compiler is told so")
    return Int4Linear(rounded_groups(layer.weight), layer.bias)


def round_weights(model: nn.Module, bits: int, kernels: Kernels) -> None:
    """As `quantize` does; but first weights become such as 4 bits hold."""
    for layer in model.modules():
        if bits == 4 and isinstance(layer, Linear):
            layer.weight.copy_(in_bits(layer, 4, kernels).groups.widened())
    if bits < 16:
        quantize(model, bits)
