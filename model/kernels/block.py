"""A whole layer of the decoder in one call of the CPU kernels.

Python takes as long to go from kernel to kernel as a small model's kernels take. Here it hands
over the arguments of a layer once.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor, nn

from cache.kv import LayerKV
from cache.terms import KeyFrame
from model.attention.bias import StepBias
from model.attention.cpu import CpuAttention
from model.batch import ForwardBatch
from model.encodings.base import PositionalEncoding
from model.kernels.build import BlockArguments, Kernels, LinearArguments
from model.kernels.modules import (
    Int8PanelLinear,
    KernelRMSNorm,
    KernelRoPE,
    KernelSiluGate,
    PanelLinear,
)
from model.transformer import Block, GatedMLP


class Part(IntEnum):
    """What the time of a layer is spent on, as layer.hpp numbers it."""

    NORM = 0
    LINEAR = 1
    TURN = 2  # queries and keys turned
    STORE = 3  # keys and values written
    ATTENTION = 4  # with the bias, and with the turning that a key frame leaves to attention
    GATE = 5
    RESIDUAL = 6


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a layer: all that the one call computes."""

    norms: dict[str, KernelRMSNorm]
    linears: dict[str, PanelLinear | Int8PanelLinear]
    attend: CpuAttention
    encoding: PositionalEncoding


def parts_of(block: nn.Module) -> Parts | None:
    """None if the one call would not compute just what the block's own parts do."""
    if type(block) is not Block or not isinstance(block.mlp, GatedMLP):
        return None
    attention, mlp = block.attention, block.mlp
    norms: dict[str, nn.Module | None] = {
        "attention_norm": block.attention_norm,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
        "mlp_norm": block.mlp_norm,
    }
    linears: dict[str, nn.Module] = {
        "qkv": attention.qkv,
        "out": attention.out,
        "gate_up": mlp.gate_up,
        "down": mlp.down,
    }
    kernel_norms = {name: each for name, each in norms.items() if isinstance(each, KernelRMSNorm)}
    panels = {
        name: each
        for name, each in linears.items()
        if isinstance(each, PanelLinear | Int8PanelLinear)
    }
    wanted = {name for name, each in norms.items() if each is not None}
    encoding = attention.encoding
    turned_by_us = isinstance(encoding, KernelRoPE)
    if (
        attention.clip is not None
        or kernel_norms.keys() != wanted
        or panels.keys() != linears.keys()
        or not isinstance(mlp.gate, KernelSiluGate)
        or not isinstance(attention.attend, CpuAttention)
        or not (turned_by_us or type(encoding).rotate is PositionalEncoding.rotate)
    ):
        return None
    return Parts(kernel_norms, panels, attention.attend, encoding)


class KernelBlock(nn.Module):
    """Computes what `block` does; `parts` are its own.

    seconds: float64 [Part] that each call adds its times to, or None.
    """

    def __init__(self, block: nn.Module, parts: Parts, kernels: Kernels) -> None:
        super().__init__()
        self.block = block
        self.seconds: Tensor | None = None
        self._parts = parts
        self._kernels = kernels
        self._norms = {name: norm.weight.data_ptr() for name, norm in parts.norms.items()}
        self._eps = parts.norms["mlp_norm"].eps  # one for all norms of a model
        self._linears = {name: _linear_arguments(each) for name, each in parts.linears.items()}
        attended, self._width = self._linears["out"].inputs, self._linears["down"].outputs
        # Numbers of scratch for each row, and for each row that is kept.
        self._per_row = self._width + self._linears["qkv"].outputs + 2 * attended
        self._per_kept = attended + self._linears["gate_up"].outputs + self._linears["down"].inputs

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
        bias: StepBias | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        count = len(x)
        kept = count if rows is None else len(rows)
        x = x.contiguous()
        y = x.new_empty(kept, self._width)
        scratch = x.new_empty(count * self._per_row + kept * self._per_kept)
        encoding = self._parts.encoding
        attend, _tensors = self._parts.attend.arguments(kv, batch, bias, encoding.rotation())
        arguments = BlockArguments(
            x=x.data_ptr(),
            y=y.data_ptr(),
            scratch=scratch.data_ptr(),
            attend=ctypes.pointer(attend),
            slots=batch.slots.data_ptr(),
            kept=None if rows is None else rows.data_ptr(),
            rows=count,
            kept_rows=kept,
            eps=self._eps,
            seconds=None if self.seconds is None else self.seconds.data_ptr(),
            **self._norms,
            **self._linears,
        )
        if isinstance(encoding, KernelRoPE):
            _add_turn(arguments, encoding, batch)
        self._kernels.block(x.dtype, arguments)
        return y


def _add_turn(arguments: BlockArguments, rope: KernelRoPE, batch: ForwardBatch) -> None:
    """What `rope.rotate` would turn."""
    arguments.cosines, arguments.sines = rope.cos.data_ptr(), rope.sin.data_ptr()
    arguments.pairs, arguments.interleaved = rope.cos.shape[1], int(rope.interleaved)
    match rope.key_frame:
        case KeyFrame.ABSOLUTE:
            arguments.q_positions = arguments.k_positions = batch.positions.data_ptr()
        case KeyFrame.BLOCK:
            arguments.k_positions = batch.offsets.data_ptr()


def _linear_arguments(linear: PanelLinear | Int8PanelLinear) -> LinearArguments:
    scale = linear.scale if isinstance(linear, Int8PanelLinear) else None
    return LinearArguments(
        packed=linear.panels.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        bias=None if linear.bias is None else linear.bias.data_ptr(),
        inputs=linear.panels.shape[1],
        outputs=linear.outputs,
    )
