"""Faster substitutes for the decoder's modules and rotations on the CPU.

The decoder's own modules remain the definition: each substitute differs from its original only by
rounding, which the tests check. model/kernels/substitutes.py swaps them in.
"""

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ropewalk.cache.types import KeyFrame
from ropewalk.model.config import Activation
from ropewalk.model.encodings.base import PositionalEncoding, inherits
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.bindings import Kernels, LinearArguments, NormArguments, in_strips
from ropewalk.model.layers.decoder import LayerNorm, RMSNorm
from ropewalk.model.layers.linear import AnyLinear, Int4Linear, Int8Linear

# Numbered as in outputs.hpp.
_ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu": 4,
}


class PanelLinear(nn.Module):
    """Our kernel over packed panels. Each row's sum is independent of the other rows.

    Where the processor multiplies 8-bit integers, inputs of 8- or 4-bit weights are rounded to
    8 bits as well, in groups of 32 per row.
    """

    gated = False

    def __init__(
        self,
        linear: AnyLinear,
        kernels: Kernels,
        activation: Activation | None = None,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.activation = activation
        order = in_strips if self.gated else torch.Tensor.contiguous
        self.scale = None
        match linear:
            case Int4Linear():
                weight, self.bits = linear.groups.numbers, 4
                self.panels = kernels.pack_int4(linear.groups, self.gated)
            case Int8Linear():
                weight, self.bits = linear.rounded, 8
                self.panels, self.scale = kernels.pack(weight, self.gated), order(linear.scale)
            case _:
                weight, self.bits = linear.weight, 0
                self.panels = kernels.pack(weight, self.gated)
        self.outputs, self.inputs = weight.shape
        self.bias = None if linear.bias is None else order(linear.bias.float())

    def fixed_tensors(self) -> dict[str, Tensor]:
        """See model/weights/fixed.py."""
        held = {"panels": self.panels, "scale": self.scale, "bias": self.bias}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(self.arguments(), x)

    def arguments(self) -> LinearArguments:
        return LinearArguments(
            packed=self.panels.data_ptr(),
            scale=None if self.scale is None else self.scale.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            bits=self.bits,
            gated=self.gated,
            activation=_ACTIVATIONS[self.activation],
        )


class GatedPanelLinear(PanelLinear):
    """activation(gate) · up, for a linear layer whose outputs are gate, up."""

    gated = True

    def __init__(self, linear: AnyLinear, kernels: Kernels, activation: Activation) -> None:
        super().__init__(linear, kernels, activation)
        self.outputs //= 2


class KernelNorm(nn.Module):
    def __init__(self, norm: RMSNorm | LayerNorm, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = norm.weight
        self.bias = norm.bias if isinstance(norm, LayerNorm) else None
        self.centred = isinstance(norm, LayerNorm)
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm(self.arguments(), x, self.eps)

    def arguments(self) -> NormArguments:
        return NormArguments(
            weight=self.weight.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            centred=self.centred,
        )


class RotationTables:
    """What kernels need to rotate as one RoPE does, with the tables it had at construction."""

    def __init__(self, rope: RoPE) -> None:
        self.key_frame = rope.key_frame
        self.cos, self.sin = rope.cos.contiguous(), rope.sin.contiguous()
        self.interleaved = rope.layout == "interleaved"

    def fixed_tensors(self) -> dict[str, Tensor]:
        """See model/weights/fixed.py."""
        return {"cos": self.cos, "sin": self.sin}

    @staticmethod
    def can_stand_for(encoding: PositionalEncoding, head_dim: int) -> TypeGuard[RoPE]:
        """Whether the encoding rotates exactly as RoPE does, by tables that kernels can read."""
        if not isinstance(encoding, RoPE) or not inherits(encoding.rotate, encoding, RoPE.rotate):
            return False
        cos, sin = encoding.cos, encoding.sin
        return (
            cos.dtype is sin.dtype is torch.float32
            and cos.shape == sin.shape
            and cos.dim() == 2
            and len(cos) >= (encoding.max_positions or math.inf)
            and 2 * cos.shape[1] <= head_dim
        )


class KernelRotate(RotationTables):
    """On the CPU: queries, then keys."""

    def __init__(self, rope: RoPE, kernels: Kernels) -> None:
        super().__init__(rope)
        self.kernels = kernels

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        match self.key_frame:
            case KeyFrame.ABSOLUTE:
                return self._turned(q, positions), self._turned(k, positions)
            case KeyFrame.BLOCK:
                return q, self._turned(k, offsets)
            case KeyFrame.RAW:
                return q, k

    def _turned(self, x: Tensor, at: Tensor) -> Tensor:
        return self.kernels.rotate(x, self.cos, self.sin, at, self.interleaved)
