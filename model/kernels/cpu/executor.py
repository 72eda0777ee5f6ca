"""Runs programs on the CPU: one call into C++, which walks the ops in order.

Going from op to op in Python takes as long as a small model's kernels. So everything that stays the
same from step to step is told to C++ once, and of a batch that is updated in place, as decode steps
do, even that is told once. Ops that only Python can compute, an encoding's own code, are computed
between two calls, in the same memory.
"""

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass, field, fields
from operator import is_
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ropewalk.cache.kv import Int8LayerKV, KVCache
from ropewalk.model.attention.base import AttentionBackend, step_bias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import PositionalEncoding, asks_keys
from ropewalk.model.kernels.cpu.bindings import SUFFIXES, AttendArguments, Kernels, StepArguments
from ropewalk.model.kernels.cpu.lowering import (
    KNOWN,
    Lowered,
    Span,
    Stage,
    is_dense,
    lower,
    without_head,
)
from ropewalk.model.layers.executor import (
    Pass,
    attended,
    embedded,
    gates_of,
    in_heads,
    query_bias,
    rotated,
)
from ropewalk.model.program import AskQuery, Attend, Forget, Place, Program, Rotate, part_of
from ropewalk.model.watch import Watch
from ropewalk.model.weights.quantize import Int4, Int8


def why_not(program: Program, kernels: Kernels | str) -> str | None:
    """Why a program cannot be run here at all."""
    if program.device.type != "cpu":
        return f"the device is {program.device.type}"
    if program.dtype not in SUFFIXES:
        return f"it computes float32 and bfloat16, not {program.dtype}"
    unknown = {type(op).__name__ for op in (*program.prompt_ops, *program.ops)} - KNOWN
    if unknown:
        return f"its kernels do not know the op {', '.join(sorted(unknown))}"
    return kernels if isinstance(kernels, str) else None


class CpuExecutor:
    """As TorchExecutor; results differ by rounding only. Packs the weights, and keeps no others."""

    name = "cpu"
    recordable = False
    rotates_apart = True  # while each op's time is

    def __init__(
        self, program: Program, kernels: Kernels, backend: AttentionBackend | None = None
    ) -> None:
        """backend: computes attention instead of these kernels."""
        self._dtype = program.dtype
        self._answers = lower(program, program.ops, kernels, backend)
        self._hidden = without_head(self._answers)
        self._prompts: Lowered | None = None
        if program.prompt_ops:
            self._prompts = lower(program, program.prompt_ops, kernels, backend)
        self._told: _Told | None = None
        self._kernels = kernels
        self.rounds_inputs = any(isinstance(w, Int8 | Int4) for w in program.weights.values())

    def fixed_tensors(self) -> dict[str, Tensor]:
        """As in TorchExecutor, in the packed form."""
        of_prompts = {} if self._prompts is None else self._prompts.held
        return {**of_prompts, **self._answers.held}

    def __call__(self, batch: ForwardBatch, kv: KVCache, watch: Watch | None = None) -> Tensor:
        """Raises IndexError for a token that is not in the vocabulary."""
        if batch.coming is not None:
            batch = batch.to(kv.device)
        if self._prompts is not None and batch.cross is not None and batch.cross.new is not None:
            prompts = batch.cross.new
            once = _tell(self._prompts, prompts, kv, self._dtype)
            self._run(self._prompts, once, prompts, kv, watch)
        tensors = _tensors(batch)
        told = self._told
        if told is None or kv is not told.kv() or not all(map(is_, tensors, told.batch)):
            self._told = told = None  # frees its scratch before the next is allocated
            told = _tell(self._answers, batch, kv, self._dtype)
            if batch.cross is None and not self._answers.dense:
                self._told = told
        lowered = self._hidden if batch.hidden else self._answers
        result = torch.empty(told.step.kept_rows, lowered.columns, dtype=self._dtype)
        told.step.result = result.data_ptr()
        self._run(lowered, told, batch, kv, watch)
        return result

    def _run(
        self,
        lowered: "Lowered",
        told: "_Told",
        batch: ForwardBatch,
        kv: KVCache,
        watch: Watch | None,
    ) -> None:
        now = Pass(batch, kv)
        told.step.seconds = None if watch is None else watch.seconds.data_ptr()
        for stage in lowered.stages:
            if stage.op is not None:
                told.compute(lowered, stage, now)
                if watch is not None:
                    watch.spent(part_of(stage.op))
                continue
            if stage.dense is not None:
                told.add_bias(lowered, stage.dense, now)
            self._kernels.run(self._dtype, lowered.ops, stage.which, told.step)
            if watch is not None:
                watch.skip()


@dataclass(slots=True)
class _Told:
    """Arguments for a batch, and what must be kept alive with them."""

    batch: list[Tensor]
    kv: "ReferenceType[KVCache]"  # its owner keeps it alive
    step: StepArguments
    attends: "Array[AttendArguments]"
    scratch: Tensor
    held: list[Tensor]
    biased: list[Tensor] = field(default_factory=list)

    @torch.inference_mode()
    def add_bias(self, lowered: Lowered, encoding: PositionalEncoding, now: Pass) -> None:
        """Build an encoding's dense bias, or its queries' own. Only one is held at a time."""
        self.biased = []
        bias = now.bias(encoding)
        for index, (attend, op) in enumerate(lowered.attends):
            if op.encoding is encoding:  # layers with other windows may have their own copy
                self.attends[index], held = attend.arguments(
                    now.layer(0), now.batch, bias, encoding.rotation()
                )
                self.biased += held

    @torch.inference_mode()
    def compute(self, lowered: Lowered, stage: Stage, now: Pass) -> None:
        """An op that only Python can compute."""
        values = [self._view(part) for part in stage.parts]
        results: Sequence[Tensor] = ()
        match stage.op:
            case Attend() as op:
                assert stage.attend is not None
                q, *values = values
                results = [attended(op, stage.attend, now, q)]
            case Forget(encoding=encoding, layer=layer):
                (x,), values = values, []
                now.layer(layer).write_gates(gates_of(encoding, x), now.batch.slots)
            case AskQuery(encoding=encoding, head_dim=head_dim):
                (x, q), values = values, []
                now.of_queries = query_bias(encoding, x, in_heads(q, head_dim))
                self.add_bias(lowered, encoding, now)
            case Place(encoding=encoding):
                results = [embedded(encoding, values[0], now.batch.positions)]
            case Rotate(encoding=encoding, head_dim=head_dim):
                q, k = (in_heads(each, head_dim) for each in values)
                results = [each.flatten(1) for each in rotated(encoding, q, k, now.batch)]
        for value, result in zip(values, results, strict=True):
            if result.data_ptr() != value.data_ptr():  # else it was left as it is
                value.copy_(result)

    def _view(self, span: Span) -> Tensor:
        """[rows, columns] in the scratch."""
        rows, value = self.step.rows, span.value
        size = (rows, span.count)
        return self.scratch.as_strided(size, (value.width, 1), value.start * rows + span.first)


_NAMES = [each.name for each in fields(ForwardBatch) if each.type is Tensor]


def _tensors(batch: ForwardBatch) -> list[Tensor]:
    return [getattr(batch, name) for name in _NAMES]


@torch.inference_mode()
def _tell(lowered: Lowered, batch: ForwardBatch, kv: KVCache, dtype: torch.dtype) -> _Told:
    """Arguments for a batch: all but results, times and dense biases."""
    first, rows = kv.layer(0), len(batch.tokens)
    attends = (AttendArguments * len(lowered.attends))()
    held: list[Tensor] = []
    for index, (attend, op) in enumerate(lowered.attends):
        over, bias, rotation = batch, None, None
        if op.crosses:
            assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
            over = batch.cross.seen
        if op.encoding is not None:
            rotation = op.encoding.rotation()
            # Else its stage builds it, or attention is no kernel's.
            if not is_dense(op) and not asks_keys(op.encoding):
                bias = step_bias(op.encoding, batch, kv.block_size)
        attends[index], tensors = attend.arguments(first, over, bias, rotation)
        held += tensors
    scratch = torch.empty(rows * (lowered.each_row + lowered.run), dtype=dtype)
    kept = batch.output_rows if lowered.keeps else None
    whole = kv.whole
    gates = whole.gates
    step = StepArguments(
        scratch=scratch.data_ptr(),
        tokens=batch.tokens.data_ptr(),
        positions=batch.positions.data_ptr(),
        offsets=batch.offsets.data_ptr(),
        slots=batch.slots.data_ptr(),
        kept=None if kept is None else kept.data_ptr(),
        rows=rows,
        kept_rows=rows if kept is None else len(kept),
        each_row=lowered.each_row,
        run=lowered.run,
        attends=attends,
        layer_bytes=whole.keys.stride(0) * whole.keys.element_size(),
        layer_scales=whole.key_scales.stride(0) if isinstance(whole, Int8LayerKV) else 0,
        gates=None if gates is None else gates.data_ptr(),
        layer_gates=0 if gates is None else gates.stride(0),
    )
    return _Told(_tensors(batch), ref(kv), step, attends, scratch, held)
