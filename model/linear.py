"""Linear layers, as torch multiplies them. Faster forms are model/kernels/modules.py's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROUNDED_AT_ONCE = 1 << 19  # weights: widened they stay in a cache


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


class Int8Linear(nn.Module):
    """y = (x · roundedᵀ) · scale + bias: 8-bit weights with one scale for each output.

    Weights alone are rounded; sums are of the input's precision or wider, so nothing of x is lost.
    Of the CPU kernels, those for processors that multiply 8-bit integers round x, too.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.rounded, self.scale = rounded_rows(linear.weight)
        self.bias = linear.bias
        # A power of two and what is left of the scale, from 1 to 2. The first goes into the
        # product, where it rounds nothing and keeps sums as small as y: float16 would not hold
        # those of whole numbers.
        self.rest = 2 * self.scale.frexp().mantissa
        self.power = self.scale / self.rest

    def forward(self, x: Tensor) -> Tensor:
        weight = self.rounded * self.power.to(x.dtype)[:, None]
        y = F.linear(x, weight).float() * self.rest
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] → int8 of that shape and float32 [rows], whose product is near it.

    In equal steps, the largest value of a row at ±127.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    some = max(1, ROUNDED_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), some):
        rows = slice(first, first + some)
        wide = weight[rows].float()
        scale[rows] = wide.abs().amax(dim=1).clamp(min=1e-12) / 127
        rounded[rows] = torch.round(wide / scale[rows, None])
    return rounded, scale


def quantize(model: nn.Module) -> None:
    """Round the weights of all linear layers inside a model. Call once, after loading."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, Int8Linear(child))
