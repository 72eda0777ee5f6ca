"""Linear layers: the one place where a matrix's stored form is chosen.

`Linear` multiplies with torch until it is packed, once, after its weights have been loaded.
Packing picks the fastest form for the machine; the result differs from torch by rounding only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels.build import SUFFIXES, Kernels


class Linear(nn.Module):
    """y = x · weightᵀ + bias; x [T, inputs] → [T, outputs]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=dtype, device=device), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(outputs, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def packed(self, kernels: Kernels) -> nn.Module:
        """What multiplies like this layer, faster; the layer itself when torch is fastest.

        Processors with bfloat16 arithmetic (AMX, AVX512-BF16) go through oneDNN's packed form,
        which uses it; others through our own panels, which widen on load.
        """
        dtype = self.weight.dtype
        if self.weight.device.type != "cpu" or dtype not in SUFFIXES:
            return self
        if dtype is torch.bfloat16 and has_bf16_arithmetic():
            return OneDnnLinear(self)
        return PanelLinear(self, kernels)


class PanelLinear(nn.Module):
    """Our own kernel over packed panels. Each row's sum is independent of the other rows."""

    def __init__(self, linear: Linear, kernels: Kernels) -> None:
        super().__init__()
        self.outputs = linear.outputs
        self.kernels = kernels
        self.panels = kernels.pack(linear.weight)
        self.bias = None if linear.bias is None else linear.bias.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.panels, self.bias, self.outputs)


class OneDnnLinear(nn.Module):
    """oneDNN over weights it has reordered once, for about 32 rows; one order serves all counts.

    The operators are torch's own but not public: `pyproject.toml` bounds torch's version.
    """

    ROWS = 32

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, self.ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bfloat16 itself, as opposed to widening it."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pack(model: nn.Module, kernels: Kernels) -> None:
    """Replace every Linear inside `model` by its packed form. Call once, after loading."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, child.packed(kernels))
