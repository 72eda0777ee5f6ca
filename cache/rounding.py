"""Keys and values in 8 bits: equal steps, the largest number of an entry at ±127.

Everything is float32 in one fixed order, because the CPU kernels do the same (layer.hpp) and both
must store the same bits.
"""

import torch
from torch import Tensor

SCALE = torch.float32
STEPS = 127
LEAST = 1e-30  # for the largest: of an entry of zeros, what it is divided by


def rounded(entries: Tensor) -> tuple[Tensor, Tensor]:
    """[..., head_dim] → int8 of that shape and scales [...]; `restored` makes them alike again.

    No number is off by more than half a scale, 0.4% of the largest. An entry that is not finite
    gets a scale that is not, and so does not pass for a good one.
    """
    wide = entries.to(SCALE)
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    steps = torch.full_like(largest, STEPS) / largest
    return torch.round(wide * steps[..., None]).to(torch.int8), largest * (1 / STEPS)


def restored(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `rounded` was given, nearly; in a dtype, the product in float32 or wider."""
    wide = torch.promote_types(dtype, SCALE)
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)
