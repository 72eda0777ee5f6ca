"""Memory of the CPU in huge pages, where the system has them to give.

135 million parameters in bfloat16 lie in 65,000 pages of 4 KiB. Each has to be looked up when it is
read, once for every token, and in a virtual machine that takes reads of its own.
"""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 2 << 20  # bytes of a huge page on x86-64, and on most ARM
_CHUNK = 32 * _PAGE
_LINE = 64


class HugePages:
    """Room for tensors that stay, side by side because many are smaller than a page.

    It is resident once it is written to, page by page. A chunk of it goes back to the system when
    nothing more is cut from it and none of its tensors is left.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Not cleared, and contiguous. Starts on a cache line."""
        size = math.prod(shape) * dtype.itemsize
        lines = -(-size // _LINE) * _LINE
        if lines > len(self._free):
            self._free = _mapped(max(lines, _CHUNK))
        taken, self._free = self._free[:size], self._free[lines:]
        return taken.view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """At least so many bytes, from the start of a huge page on."""
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # elsewhere the system decides alone
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the mapping
    return whole[-whole.data_ptr() % _PAGE :]
