"""The interface to weight files. Knows tensors by their stored names, nothing of any model."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class CheckpointError(Exception):
    """A file or folder that cannot be served; the message is one sentence that names it."""


class WeightFile(Protocol):
    """Stored tensors by name. The header is checked on opening, the data when it is read."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """The file's metadata, as plain Python values."""
        ...

    @property
    def in_4_bits(self) -> bool:
        """Whether it has 4-bit weights of a type that `--quantize int4` preserves."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """The tensor in a floating dtype, in its own memory, never a view of the file.

        Raises CheckpointError when the file no longer holds it or it is not a weight.
        """
        ...


def shown(name: str) -> str:
    """A name from a file, made safe to print: quoted, escaped and short."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
