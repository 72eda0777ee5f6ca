"""Weights of few bits, for tests of the kernels that multiply them."""

import pytest
from torch import Tensor

from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.program import Program, quantized
from ropewalk.model.weights.quantize import Int8, Weight, rounded_groups

BITS = [16, 8, 4]  # 16: as they are


def in_bits(weight: Tensor, bits: int, kernels: Kernels) -> Weight:
    """Quantise, whatever that loses. Skips the test if no kernel multiplies 4-bit weights."""
    if bits == 16:
        return weight
    if bits == 8:
        return Int8.of(weight)
    if not kernels.multiplies_int4():
        pytest.skip("this processor does not multiply 8-bit integers, or the compiler is told so")
    return rounded_groups(weight)


def round_weights(program: Program, bits: int, kernels: Kernels) -> Program:
    """As `quantized`; but first weights become such as 4 bits hold."""
    if bits == 16:
        return program
    if bits == 4:
        for name, weight in program.weights.items():
            if isinstance(weight, Tensor) and weight.dim() == 2 and name != "embed.weight":
                weight.copy_(in_bits(weight, 4, kernels).widened())
    return quantized(program, bits)
