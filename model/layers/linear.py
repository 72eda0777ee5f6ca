"""Linear layers in plain torch. model/kernels/cpu/modules.py has faster ones."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.model.encodings.base import outside_encodings

GROUP = 32  # consecutive inputs whose 4-bit weights share a scale
ROUNDED_AT_ONCE = 1 << 19  # weights: widened to float32, these still fit in a cache


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
    """y = (x · roundedᵀ) · scale + bias: 8-bit weights with one scale per output.

    Only weights are rounded: sums have the input's precision or wider. Of the CPU kernels, those
    for processors that multiply 8-bit integers round x, too.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.rounded, self.scale = rounded_rows(linear.weight)
        self.bias = linear.bias
        # The scale as a power of two times a rest from 1 to 2. The power goes into the product,
        # where it is exact and keeps sums as small as y: float16 could not hold sums of the
        # integers themselves.
        self.rest = 2 * self.scale.frexp().mantissa
        self.power = self.scale / self.rest

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Besides parameters: see model/weights/fixed.py."""
        return {name: getattr(self, name) for name in ("rounded", "scale", "rest", "power")}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.rounded * self.power.to(x.dtype)[:, None]
        y = F.linear(x, weight).float() * self.rest
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] → int8 of that shape and float32 [rows]; their product approximates it.

    In equal steps, with the largest magnitude of a row at ±127.
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


class Int4Linear(nn.Module):
    """y = x · weightᵀ + bias, with 4-bit weights number · scale + least, as in GGUF's Q4_1.

    GROUP inputs of an output share a scale and a least weight. x is treated as in Int8Linear.
    """

    def __init__(self, groups: "Groups", bias: Tensor | None) -> None:
        super().__init__()
        self.groups = groups
        self.bias = bias

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Besides parameters: see model/weights/fixed.py."""
        return {name: getattr(self.groups, name) for name in ("numbers", "scales", "leasts")}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.groups.widened().to(x.dtype), self.bias)


@dataclass(frozen=True, slots=True)
class Groups:
    """Weights in 4 bits, in groups of GROUP along each row."""

    numbers: Tensor  # uint8 [rows, columns], from 0 to 15
    scales: Tensor  # float16 [rows, groups]
    leasts: Tensor  # float16 [rows, groups]

    def widened(self) -> Tensor:
        """float32 [rows, columns]."""

        def of_each(values: Tensor) -> Tensor:
            return values.float().repeat_interleave(GROUP, dim=1)[:, : self.numbers.shape[1]]

        return self.numbers * of_each(self.scales) + of_each(self.leasts)


def rounded_groups(weight: Tensor) -> Groups:
    """Approximates a weight [rows, columns]; closely if it was 4-bit in a file before.

    Such a file leaves the weights of a group on even steps, with 8 to 15 of them between the
    least and the largest. Where 15 steps do not fit, the number that loses least is taken.
    """
    rows, columns = weight.shape
    # The last group is padded with its last column, which leaves minimum and maximum as they are.
    wide = F.pad(weight.float()[None], (0, -columns % GROUP), mode="replicate")[0]
    wide = wide.view(-1, GROUP)
    least = wide.amin(dim=1, keepdim=True).half()
    span = wide.amax(dim=1, keepdim=True) - least.float()
    scale, numbers, lost = _on_steps(15, wide, least, span)
    for steps in range(14, 7, -1):
        # A tenth of a step is more than bfloat16's rounding error and less than a chance fit's.
        (left,) = torch.where((lost > GROUP * (0.1 * scale.float()).square()).squeeze(1))
        if len(left) == 0:
            break
        tried = _on_steps(steps, wide[left], least[left], span[left])
        (better,) = torch.where((tried[2] < lost[left]).squeeze(1))
        for held, new in zip((scale, numbers, lost), tried, strict=True):
            held[left[better]] = new[better]
    numbers = numbers.view(rows, -1)[:, :columns].contiguous()
    return Groups(numbers, scale.view(rows, -1), least.view(rows, -1))


def _on_steps(
    steps: int, wide: Tensor, least: Tensor, span: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, numbers and squared error of groups whose span is divided into `steps` steps."""
    scale = (span / steps).half()
    step = scale.float()
    numbers = ((wide - least) / step.clamp(min=1e-12)).round_().clamp_(0, 15)
    lost = (numbers * step + least - wide).square_().sum(dim=1, keepdim=True)
    return scale, numbers.to(torch.uint8), lost


AnyLinear = Linear | Int8Linear | Int4Linear


def quantize(model: nn.Module, bits: Literal[8, 4] = 8) -> None:
    """Quantize linear layers, except those of encodings. Call once, after loading.

    bits: 8; or 4 for layers that lose no more by it than by 8 bits, and 8 for the others.
    """
    for module in outside_encodings(model):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, _in_4_bits(child) if bits == 4 else Int8Linear(child))


def _in_4_bits(linear: Linear) -> Int4Linear | Int8Linear:
    groups = _lossless_groups(linear.weight)
    return Int8Linear(linear) if groups is None else Int4Linear(groups, linear.bias)


def _lossless_groups(weight: Tensor) -> Groups | None:
    """The weight in 4 bits; None where that loses more than 8 bits do."""
    found: list[Groups] = []
    for rows in torch.split(weight, max(1, ROUNDED_AT_ONCE // weight.shape[1])):
        groups = rounded_groups(rows)
        rounded, scale = rounded_rows(rows)
        if not _lost(groups.widened(), rows) <= _lost(rounded * scale[:, None], rows):
            return None
        found.append(groups)
    return Groups(
        torch.cat([each.numbers for each in found]),
        torch.cat([each.scales for each in found]),
        torch.cat([each.leasts for each in found]),
    )


def _lost(rounded: Tensor, weight: Tensor) -> Tensor:
    return (rounded - weight.float()).square().sum()
