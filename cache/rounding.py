"""Keys and values in 8 bits: equal steps, with an entry's largest magnitude at ±127.

Everything is float32 in one fixed order, because the CPU kernels (layer.hpp) do the same and both
must store identical bits.
"""

import torch
from torch import Tensor

SCALE = torch.float32
STEPS = 127
LEAST = 1e-30  # lower bound of the largest magnitude: avoids dividing by 0 for an entry of zeros


def rounded(entries: Tensor) -> tuple[Tensor, Tensor]:
    """[..., head_dim] → int8 of that shape and scales [...]; `restored` approximately inverts it.

    No value is off by more than half a scale, 0.4% of the largest. An entry that is not finite
    gets a scale that is not finite, so that it cannot pass for a valid one.
    """
    wide = entries.to(SCALE)
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    steps = torch.full_like(largest, STEPS) / largest
    return torch.round(wide * steps[..., None]).to(torch.int8), largest * (1 / STEPS)


def restored(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate inverse of `rounded`: a product in float32 or wider, then cast to `dtype`."""
    wide = torch.promote_types(dtype, SCALE)
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)
