"""Weights in 8 and 4 bits: what they are rounded to, and what that loses."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # consecutive inputs whose 4-bit weights share a scale
ROUNDED_AT_ONCE = 1 << 19  # weights: widened to float32, these still fit in a cache


@dataclass(frozen=True, slots=True, eq=False)
class Int8:
    """Weights in 8 bits, with one scale per output."""

    rounded: Tensor  # int8 [outputs, inputs]
    scale: Tensor  # float32 [outputs]
    # The scale as a power of two times a rest from 1 to 2. The power goes into the product, where
    # it is exact and keeps sums as small as the result: float16 could not hold sums of integers.
    rest: Tensor
    power: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        rounded, scale = rounded_rows(weight)
        rest = 2 * scale.frexp().mantissa
        return cls(rounded, scale, rest, scale / rest)

    @property
    def shape(self) -> torch.Size:
        return self.rounded.shape

    @property
    def parts(self) -> dict[str, Tensor]:
        names = ("rounded", "scale", "rest", "power")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class Int4:
    """Weights number · scale + least, as in GGUF's Q4_1. GROUP inputs of an output share both."""

    numbers: Tensor  # uint8 [outputs, inputs], from 0 to 15
    scales: Tensor  # float16 [outputs, groups]
    leasts: Tensor  # float16 [outputs, groups]

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def parts(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers, "scales": self.scales, "leasts": self.leasts}

    def widened(self) -> Tensor:
        """float32 [outputs, inputs]."""

        def of_each(values: Tensor) -> Tensor:
            return values.float().repeat_interleave(GROUP, dim=1)[:, : self.numbers.shape[1]]

        return self.numbers * of_each(self.scales) + of_each(self.leasts)


Weight = Tensor | Int8 | Int4


def round_matrices(
    weights: Mapping[str, Weight], matrices: Collection[str], bits: Literal[8, 4] = 8
) -> dict[str, Weight]:
    """The weights, of which these matrices are rounded.

    bits: 8; or 4 for matrices that lose no more by it than by 8 bits, and 8 for the others.
    """
    found = dict(weights)
    for name in matrices:
        weight = found[name]
        assert isinstance(weight, Tensor)
        in_4 = _lossless_groups(weight) if bits == 4 else None
        found[name] = in_4 or Int8.of(weight)
    return found


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


def rounded_groups(weight: Tensor) -> Int4:
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
    return Int4(numbers, scale.view(rows, -1), least.view(rows, -1))


def _on_steps(
    steps: int, wide: Tensor, least: Tensor, span: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, numbers and squared error of groups whose span is divided into `steps` steps."""
    scale = (span / steps).half()
    step = scale.float()
    numbers = ((wide - least) / step.clamp(min=1e-12)).round_().clamp_(0, 15)
    lost = (numbers * step + least - wide).square_().sum(dim=1, keepdim=True)
    return scale, numbers.to(torch.uint8), lost


def _lossless_groups(weight: Tensor) -> Int4 | None:
    """The weight in 4 bits; None where that loses more than 8 bits do."""
    found: list[Int4] = []
    for rows in torch.split(weight, max(1, ROUNDED_AT_ONCE // weight.shape[1])):
        groups = rounded_groups(rows)
        rounded, scale = rounded_rows(rows)
        if not _lost(groups.widened(), rows) <= _lost(rounded * scale[:, None], rows):
            return None
        found.append(groups)
    return Int4(
        torch.cat([each.numbers for each in found]),
        torch.cat([each.scales for each in found]),
        torch.cat([each.leasts for each in found]),
    )


def _lost(rounded: Tensor, weight: Tensor) -> Tensor:
    return (rounded - weight.float()).square().sum()
