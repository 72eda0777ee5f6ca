"""CPU memory in huge pages, where the system offers them.

135 million parameters in bfloat16 occupy 65,000 pages of 4 KiB. Reading them once per token needs
an address translation for each page, which in a virtual machine costs further memory reads.
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
    """Memory for long-lived tensors, side by side because many are smaller than a page.

    It becomes resident page by page, as it is written to. A chunk returns to the system once
    nothing more is allocated from it and none of its tensors is left.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised, contiguous tensor that starts on a cache line."""
        size = math.prod(shape) * dtype.itemsize
        lines = -(-size // _LINE) * _LINE
        if lines > len(self._free):
            self._free = _mapped(max(lines, _CHUNK))
        taken, self._free = self._free[:size], self._free[lines:]
        return taken.view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """At least `size` bytes, starting on a huge page."""
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # elsewhere the system decides
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    return whole[-whole.data_ptr() % _PAGE :]
