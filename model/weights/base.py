"""What a file of weights offers. Knows tensors by their stored names, nothing of any model."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
CONVERT_PICKLES = (
    "convert it with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
)


class CheckpointError(Exception):
    """A file or folder that cannot be served; the message is one sentence that names it."""


class WeightFile(Protocol):
    """Stored tensors by name. The header is checked when it is opened, the data when read."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the format says besides tensors, as plain Python values."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """The tensor in a floating dtype and memory of its own, never a view of the file.

        Raises CheckpointError when the file no longer holds it or it is no weight.
        """
        ...


def shown(name: str) -> str:
    """A name out of a file, safe to print: quoted, escaped and short."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
