"""Which tensors a loaded model reads and nothing writes: its weights, as they lie in memory.

Kernels read packed copies of the weights, and encodings read tables. Whoever holds such a tensor
says so, because a model also holds scratch memory, which changes all the time.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class HoldsFixed(Protocol):
    """Has tensors besides parameters that are read in every pass and never change again."""

    def fixed_tensors(self) -> Mapping[str, Tensor]: ...


def fixed_of(**parts: object) -> dict[str, Tensor]:
    """The fixed tensors of those parts that hold any, by the part's name and their own."""
    return {
        f"{part}.{name}": tensor
        for part, holder in parts.items()
        if isinstance(holder, HoldsFixed)
        for name, tensor in holder.fixed_tensors().items()
    }


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """By name, each piece of memory once: call when the model is ready to compute."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, HoldsFixed):
            own = module.fixed_tensors()
            found |= {f"{path}.{name}".lstrip("."): tensor for name, tensor in own.items()}
    # Not twice what is tied, or a table that kernels read where the encoding keeps it.
    distinct: dict[tuple[int, int], tuple[str, Tensor]] = {}
    for name, tensor in found.items():
        distinct.setdefault((tensor.data_ptr(), tensor.nbytes), (name, tensor))
    return dict(distinct.values())
