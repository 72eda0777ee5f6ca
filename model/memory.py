"""Whether memory ran out, whoever says so."""

import errno

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, the system or torch says that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torch_says = "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or torch_says
