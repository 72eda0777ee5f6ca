"""Swaps kernels into a model, once, after loading: the CPU kernels, or Triton's on a GPU."""

from collections.abc import Callable

import torch
from torch import nn

from ropewalk.model.encodings.base import outside_encodings, rotates
from ropewalk.model.kernels.cpu.bindings import SUFFIXES, Kernels
from ropewalk.model.kernels.cpu.layers import KernelLayers, parts_of
from ropewalk.model.kernels.cpu.modules import (
    GatedPanelLinear,
    KernelNorm,
    KernelRotate,
    PanelLinear,
    RotationTables,
)
from ropewalk.model.kernels.cpu.one_call import one_call
from ropewalk.model.kernels.triton.attention import TritonAttention
from ropewalk.model.kernels.triton.layers import TritonLayers
from ropewalk.model.kernels.triton.modules import TritonGate, TritonLinear, TritonStore
from ropewalk.model.layers.decoder import (
    Activate,
    Attention,
    Decoder,
    Gate,
    GatedMLP,
    LayerNorm,
    Layers,
    PlainMLP,
    RMSNorm,
)
from ropewalk.model.layers.linear import AnyLinear, Int4Linear, Int8Linear, Linear


def substitute(model: nn.Module, kernels: Kernels, dtype: torch.dtype) -> None:
    """Replace what can be replaced in a CPU model of this dtype. Call once, after loading."""
    if dtype not in SUFFIXES:
        return
    for module in model.modules():
        if isinstance(module, GatedMLP | PlainMLP):
            _activate_at_once(module, kernels)
    _replace(model, lambda module: _faster(module, kernels))
    for attention in _attentions(model):
        if RotationTables.can_stand_for(attention.encoding, attention.head_dim):
            attention.kernel_rotate = KernelRotate(attention.encoding, kernels)
    for parent, name, child in _children(model):
        if isinstance(child, Layers):
            parts = [found for layer in child if (found := parts_of(layer)) is not None]
            if len(parts) == len(child):
                setattr(parent, name, KernelLayers(child, parts, kernels))
    if isinstance(model, Decoder):
        model.one_call = one_call(model, kernels)


def _activate_at_once(mlp: GatedMLP | PlainMLP, kernels: Kernels) -> None:
    match mlp:
        case GatedMLP(
            gate_up=Linear() | Int8Linear() | Int4Linear() as linear, gate=Gate() as gate
        ):
            mlp.gate_up = GatedPanelLinear(linear, kernels, gate.activation)
            mlp.gate = nn.Identity()
        case PlainMLP(
            up=Linear() | Int8Linear() | Int4Linear() as linear, activate=Activate() as activate
        ):
            mlp.up = PanelLinear(linear, kernels, activate.activation)
            mlp.activate = nn.Identity()


def substitute_on_gpu(model: nn.Module, dtype: torch.dtype) -> None:
    """Use Triton's kernels where the model attends in Triton. Call once, after loading."""
    if not attends_in_triton(model):
        return
    for attention in _attentions(model):
        if RotationTables.can_stand_for(attention.encoding, attention.head_dim):
            attention.kernel_store = TritonStore(RotationTables(attention.encoding))
        elif not rotates(attention.encoding):
            attention.kernel_store = TritonStore(None)
    _replace(model, lambda module: _faster_on_gpu(module, dtype))
    for parent, name, child in _children(model):
        if isinstance(child, Layers) and TritonLayers.can_stand_for(child):
            setattr(parent, name, TritonLayers(child))


def attends_in_triton(model: nn.Module) -> bool:
    attending = [each.attend for each in model.modules() if hasattr(each, "attend")]
    return any(isinstance(attend, TritonAttention) for attend in attending)


def _replace(model: nn.Module, faster: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module by `faster` of it, unless that is None."""
    made: dict[nn.Module, nn.Module | None] = {}  # modules shared by several parents stay shared
    for parent, name, child in _children(model):
        if child not in made:
            made[child] = faster(child)
        replacement = made[child]
        if replacement is not None:
            setattr(parent, name, replacement)


def _attentions(model: nn.Module) -> list[Attention]:
    return [each for each in model.modules() if isinstance(each, Attention)]


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in outside_encodings(model)
        for name, child in parent.named_children()
    ]


def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bfloat16 directly, without widening it."""
    return torch.cpu._is_avx512_bf16_supported()


def _faster(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    if isinstance(module, AnyLinear):
        return PanelLinear(module, kernels)
    if isinstance(module, RMSNorm | LayerNorm):
        return KernelNorm(module, kernels)
    return None


def _faster_on_gpu(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    if isinstance(module, Gate):
        return TritonGate(module)
    if isinstance(module, Linear | Int8Linear) and dtype in TritonLinear.DTYPES:
        return TritonLinear(module)
    return None
