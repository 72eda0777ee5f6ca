"""Lists to tensors on the cache's device, without waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor


def tensor_on(
    device: torch.device, values: Sequence[object], dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of `values` on `device`, copied asynchronously."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
