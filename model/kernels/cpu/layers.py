"""All layers of a decoder in one call of the CPU kernels.

Going from kernel to kernel in Python takes as long as a small model's kernels themselves. Here
Python only passes what changes from step to step; the rest was passed at construction.
"""

from collections.abc import Iterable, Iterator, Sequence
from ctypes import Array, pointer
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import Int8LayerKV, KVCache
from ropewalk.cache.types import KeyFrame
from ropewalk.model.attention.bias import DenseBias, StepBias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import rotates
from ropewalk.model.kernels.cpu.attention import CpuAttention
from ropewalk.model.kernels.cpu.bindings import (
    AttendArguments,
    Kernels,
    LayerArguments,
    StepArguments,
)
from ropewalk.model.kernels.cpu.modules import KernelNorm, KernelRotate, PanelLinear
from ropewalk.model.layers.decoder import (
    Attention,
    Block,
    GatedMLP,
    Layers,
    ParallelBlock,
    ParallelOneNormBlock,
)
from ropewalk.model.layers.encoder_decoder import CrossBlock


class Part(IntEnum):
    """What a pass spends its time on, numbered as in layer.hpp."""

    NORM = 0
    LINEAR = 1  # and the activation of an MLP
    TURN = 2  # rotation of queries and keys
    STORE = 3  # keys and values written
    ATTENTION = 4  # with the bias, and the rotation that a key frame leaves to attention
    RESIDUAL = 5
    EMBEDDING = 6
    HEAD = 7


# layer.hpp's codes for what rotates queries and keys before keys are stored.
_BY_NOTHING, _BY_OTHERS = 0, 3
_BY_TABLES = {KeyFrame.ABSOLUTE: 1, KeyFrame.RAW: _BY_NOTHING, KeyFrame.BLOCK: 2}


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything of a layer that the single call computes."""

    norms: dict[str, KernelNorm]
    linears: dict[str, PanelLinear]
    attention: Attention
    attend: CpuAttention
    cross: CpuAttention | None
    parallel: bool

    @property
    def turned(self) -> int:
        """What rotates queries and keys, numbered as in layer.hpp."""
        rotate = self.attention.kernel_rotate
        if isinstance(rotate, KernelRotate):
            return _BY_TABLES[rotate.key_frame]
        return _BY_OTHERS if rotates(self.attention.encoding) else _BY_NOTHING


_BLOCKS = (Block, CrossBlock, ParallelBlock, ParallelOneNormBlock)


def parts_of(block: nn.Module) -> Parts | None:
    """None if the single call would not compute exactly what the block's own modules do."""
    if not isinstance(block, Block | ParallelOneNormBlock) or type(block) not in _BLOCKS:
        return None
    attention, mlp = block.attention, block.mlp
    norms: dict[str, nn.Module | None] = {
        "attention_norm": block.attention_norm,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
        "mlp_norm": block.mlp_norm if isinstance(block, Block) else block.attention_norm,
    }
    linears: dict[str, nn.Module] = {
        "qkv": attention.qkv,
        "out": attention.out,
        "up": mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up,
        "down": mlp.down,
    }
    cross = None
    if isinstance(block, CrossBlock):
        norms["cross_norm"] = block.cross_norm
        linears |= {"cross_q": block.cross.q, "cross_out": block.cross.out}
        cross = block.cross.attend
    kernel_norms = {name: each for name, each in norms.items() if isinstance(each, KernelNorm)}
    panels = {name: each for name, each in linears.items() if isinstance(each, PanelLinear)}
    wanted = {name for name, each in norms.items() if each is not None}
    if (
        kernel_norms.keys() != wanted
        or panels.keys() != linears.keys()
        or not isinstance(mlp.gate if isinstance(mlp, GatedMLP) else mlp.activate, nn.Identity)
        or not isinstance(attention.attend, CpuAttention)
        or not isinstance(cross, CpuAttention | None)
    ):
        return None
    parallel = isinstance(block, ParallelBlock | ParallelOneNormBlock)
    return Parts(kernel_norms, panels, attention, attention.attend, cross, parallel)


class KernelLayers(Layers):
    """Computes the same as `layers`, whose parts are `parts`.

    seconds: float64 [Part], to which each call adds its times, or None.
    """

    def __init__(self, layers: Layers, parts: Sequence[Parts], kernels: Kernels) -> None:
        super().__init__(layers)
        self.seconds: Tensor | None = None
        self._parts = parts
        self._kernels = kernels
        # Layers with equal attention are of one kind: most models have one or two.
        specs = [(each.attend.spec, id(each.attention.encoding)) for each in parts]
        self._kinds = [specs.index(spec) for spec in dict.fromkeys(specs)]  # one layer of each
        self._kind_of = [list(dict.fromkeys(specs)).index(spec) for spec in specs]
        self._attends_type = AttendArguments * len(self._kinds)
        self.turned_by_others = {
            index for index, each in enumerate(parts) if each.turned == _BY_OTHERS
        }
        # What the kernels need to know of each layer in every step.
        arguments = [
            _layer_arguments(own, index, kind)
            for index, (own, kind) in enumerate(zip(parts, self._kind_of, strict=True))
        ]
        self.constants = (LayerArguments * len(parts))(*arguments)
        of_one = self.constants[0]
        attended, self._width = of_one.out.inputs, of_one.down.outputs
        # Elements of scratch per row.
        wide = max(of_one.qkv.outputs, of_one.down.inputs)
        self._scratch = 3 * self._width + 2 * attended + wide

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: KVCache,
        biases: Iterable[StepBias | None],
        rows: Tensor | None = None,
    ) -> Tensor:
        for run, added in _runs(biases):
            last = run.stop == len(self)
            x = self._compute(x, batch, kv, run, added, rows if last else None)
        return x

    def _compute(
        self,
        x: Tensor,
        batch: ForwardBatch,
        kv: KVCache,
        run: range,
        biases: Sequence[StepBias | None],
        rows: Tensor | None,
    ) -> Tensor:
        """Run the layers in `run`, whose biases are `biases`."""
        x = x.contiguous()
        step, (y, *_tensors) = self.arguments(x.dtype, batch, kv, run, biases, rows)
        step.x = x.data_ptr()
        compute = partial(self._kernels.layers, x.dtype, self.constants, run)
        done = 0  # half-layers
        turning = [layer for layer in run if layer in self.turned_by_others]
        if turning:
            qkv = torch.empty(len(x), self.constants[0].qkv.outputs, dtype=x.dtype)
            step.qkv = qkv.data_ptr()
            q, k, _ = self._parts[0].attention.parts(qkv)
        for layer in turning:
            middle = 2 * (layer - run.start) + 1
            compute(range(done, middle), step)
            rotated = self._parts[layer].attention.rotated(q, k, batch)
            q_rotated, k_rotated = (each.contiguous() for each in rotated)
            step.q, step.k = q_rotated.data_ptr(), k_rotated.data_ptr()
            done = middle
        compute(range(done, 2 * len(run)), step)
        return y

    def arguments(
        self,
        dtype: torch.dtype,
        batch: ForwardBatch,
        kv: KVCache,
        run: range,
        biases: Sequence[StepBias | None],
        rows: Tensor | None,
    ) -> tuple[StepArguments, list[Tensor]]:
        """Arguments for layers with these biases, except `x` and rotations made by others; and the
        tensors to keep alive while these are used, of which the first is y [rows, width]."""
        count = len(batch.tokens)
        kept = count if rows is None else len(rows)
        y = torch.empty(kept, self._width, dtype=dtype)
        scratch = torch.empty(count * self._scratch, dtype=dtype)
        attends, tensors = self._attends(kv, batch, run, biases)
        cross, more = self._cross(kv, batch)
        whole = kv.whole
        step = StepArguments(
            y=y.data_ptr(),
            scratch=scratch.data_ptr(),
            offsets=batch.offsets.data_ptr(),
            slots=batch.slots.data_ptr(),
            kept=None if rows is None else rows.data_ptr(),
            rows=count,
            kept_rows=kept,
            attends=attends,
            cross=None if cross is None else pointer(cross),
            layer_bytes=whole.keys.stride(0) * whole.keys.element_size(),
            layer_scales=whole.key_scales.stride(0) if isinstance(whole, Int8LayerKV) else 0,
            seconds=None if self.seconds is None else self.seconds.data_ptr(),
        )
        return step, [y, scratch, *tensors, *more]

    def _attends(
        self, kv: KVCache, batch: ForwardBatch, run: range, biases: Sequence[StepBias | None]
    ) -> tuple["Array[AttendArguments]", list[Tensor]]:
        """By kind, for the kinds of these layers; and tensors to keep alive meanwhile."""
        attends = self._attends_type()
        held: list[Tensor] = []
        first = kv.layer(0)
        added = dict(zip(self._kind_of[run.start : run.stop], biases, strict=True))
        for kind, bias in added.items():
            parts = self._parts[self._kinds[kind]]
            rotation = parts.attention.encoding.rotation()
            attends[kind], tensors = parts.attend.arguments(first, batch, bias, rotation)
            held += tensors
        return attends, held

    def _cross(
        self, kv: KVCache, batch: ForwardBatch
    ) -> tuple[AttendArguments | None, tuple[Tensor, ...]]:
        """The same for attention to encoded prompts, which is equal in all layers."""
        attend = self._parts[0].cross
        if attend is None:
            return None, ()
        assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
        return attend.arguments(kv.layer(0), batch.cross.seen, None, None)


def _runs(
    biases: Iterable[StepBias | None],
) -> Iterator[tuple[range, Sequence[StepBias | None]]]:
    """Consecutive layers with their biases, such that a run has at most one dense bias."""
    first = 0
    for _, run in groupby(biases, key=lambda bias: isinstance(bias, DenseBias) and id(bias)):
        added = list(run)
        yield range(first, first + len(added)), added
        first += len(added)


def _layer_arguments(parts: Parts, index: int, kind: int) -> LayerArguments:
    """The arguments that stay the same in every step."""
    arguments = LayerArguments(
        **{name: norm.arguments() for name, norm in parts.norms.items()},
        **{name: each.arguments() for name, each in parts.linears.items()},
        index=index,
        kind=kind,
        parallel=parts.parallel,
        turned=parts.turned,
        clip=parts.attention.clip or 0.0,
        eps=parts.norms["mlp_norm"].eps,  # one for all norms of a model
    )
    rotate = parts.attention.kernel_rotate
    if isinstance(rotate, KernelRotate):
        arguments.cosines, arguments.sines = rotate.cos.data_ptr(), rotate.sin.data_ptr()
        arguments.pairs, arguments.interleaved = rotate.cos.shape[1], int(rotate.interleaved)
    return arguments
