"""The Triton backend wherever the tests run: on a GPU, or in Triton's interpreter without one."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from ropewalk.model.kernels.triton.attention import TritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def moved(value, device):
    """A tensor, or an object that holds tensors, moved to another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if is_dataclass(value):
        changes = {each.name: moved(getattr(value, each.name), device) for each in fields(value)}
        return replace(value, **changes)
    if isinstance(value, tuple):
        return type(value)(*(moved(each, device) for each in value))
    return value


def drawn(*size, dtype=torch.float32, seed=0, scale=1.0):
    """Normal values on that device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=generator) * scale).to(DEVICE, dtype)


class TritonHere:
    """Accepts any device in the spec, and takes and returns tensors on any device."""

    name = "triton"

    def __init__(self, given):
        pytest.importorskip("triton", reason="Triton is not installed")
        self.attend = TritonAttention(replace(given, device=DEVICE))

    def __call__(self, q, *others):
        out = self.attend(*(moved(each, DEVICE) for each in (q, *others)))
        return out.to(q.device)
