"""Runs programs op by op in torch: the definition, the oracle, and what training differentiates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.kv import KVCache, PagedKV
from ropewalk.model.attention.base import Attend as AttendPaged
from ropewalk.model.attention.base import AttentionBackend, AttentionSpec
from ropewalk.model.attention.bias import StepBias, step_bias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import Activation
from ropewalk.model.encodings.base import EncodingError, PositionalEncoding
from ropewalk.model.program import (
    Activate,
    Add,
    Attend,
    Clip,
    Embed,
    Gate,
    Keep,
    Linear,
    Norm,
    Op,
    Part,
    Place,
    Program,
    Rotate,
    Scale,
    Store,
    live_after,
    part_of,
)
from ropewalk.model.weights.quantize import Int4, Int8, Weight
from ropewalk.model.watch import Watch

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(slots=True)
class Pass:
    """One run of a list of ops over a batch."""

    batch: ForwardBatch
    kv: KVCache
    layers: dict[int, PagedKV] = field(default_factory=dict)
    biased: tuple[PositionalEncoding, StepBias | None] | None = None

    def layer(self, index: int) -> PagedKV:
        if index not in self.layers:
            self.layers[index] = self.kv.layer(index)
        return self.layers[index]

    def bias(self, encoding: PositionalEncoding | None) -> StepBias | None:
        """What the encoding adds to scores. Only the last one is kept: it may be dense."""
        if encoding is None:
            return None
        if self.biased is None or self.biased[0] is not encoding:
            self.biased = None  # freed before the next is built
            self.biased = encoding, step_bias(encoding, self.batch, self.kv.block_size)
        return self.biased[1]


class TorchExecutor:
    """Attention is a backend's. Called with a batch in host memory or on the program's device."""

    name = "torch"
    recordable = False  # whether a CUDA graph can hold its passes

    def __init__(self, program: Program, backend: AttentionBackend) -> None:
        self.program = program
        self._attends: dict[AttentionSpec, AttendPaged] = {}
        self._backend = backend
        for op in (*program.prompt_ops, *program.ops):
            if isinstance(op, Attend):
                spec = spec_of(op, program)
                self._attends.setdefault(spec, backend(spec))
        self._prompt_steps = self._steps(program.prompt_ops, ())
        self._answer_steps = self._steps(program.ops, ("logits",))

    @property
    def rotates_apart(self) -> bool:
        """Whether the time to rotate queries and keys is told from others'."""
        return True

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Weights as they are read, besides those of encodings: see model/fixed.py."""
        found: dict[str, Tensor] = {}
        for name, weight in self.program.weights.items():
            if isinstance(weight, Tensor):
                found[name] = weight
            else:
                owner = name.removesuffix(".weight")
                found |= {f"{owner}.{part}": each for part, each in weight.parts.items()}
        return found

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch, kv: KVCache, watch: Watch | None = None) -> Tensor:
        return self.compute(batch.to(kv.device), kv, watch)

    def compute(self, batch: ForwardBatch, kv: KVCache, watch: Watch | None = None) -> Tensor:
        """The same with gradients, over a batch on the device."""
        if batch.cross is not None and batch.cross.new is not None:
            self._run(self._prompt_steps, batch.cross.new, kv, watch)
        return self._run(self._answer_steps, batch, kv, watch)["logits"]

    def _run(
        self, steps: "Sequence[_Step]", batch: ForwardBatch, kv: KVCache, watch: Watch | None
    ) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        now = Pass(batch, kv)
        for step in steps:
            results = step.compute(step.op, now, *[values[name] for name in step.reads])
            values.update(zip(step.writes, results, strict=True))
            for name in step.dies:
                del values[name]
            if watch is not None:
                watch.spent(step.part)
        return values

    def _steps(self, ops: Sequence[Op], results: Sequence[str]) -> "list[_Step]":
        made = []
        for op, live in zip(ops, live_after(ops), strict=True):
            reads, writes = op.reads.split(), op.writes.split()
            dies = {*reads, *writes} - live - {*results}
            made.append(_Step(op, self._how(op), reads, writes, tuple(dies), part_of(op)))
        return made

    def _how(self, op: Op) -> Callable[..., Sequence[Tensor]]:
        """What computes an op: (op, pass, values read) → values written."""
        return {
            Embed: self._embed,
            Place: _place,
            Norm: self._norm,
            Linear: self._linear,
            Clip: _clip,
            Rotate: _rotate,
            Store: _store,
            Attend: self._attend,
            Gate: _gate,
            Activate: _activate,
            Scale: _scale,
            Add: _add,
            Keep: _keep,
        }[type(op)]

    def _embed(self, op: Embed, now: Pass) -> Sequence[Tensor]:
        return (F.embedding(now.batch.tokens, self.program.full(f"{op.name}.weight")),)

    def _norm(self, op: Norm, now: Pass, x: Tensor) -> Sequence[Tensor]:
        return (norm(op, self.program.full(f"{op.name}.weight"), self.program.bias(op), x),)

    def _linear(self, op: Linear, now: Pass, x: Tensor) -> Sequence[Tensor]:
        y = linear(x, self.program.weights[f"{op.name}.weight"], self.program.bias(op))
        return (y,) if len(op.outputs) == 1 else y.split(op.outputs, dim=-1)

    def _attend(self, op: Attend, now: Pass, q: Tensor) -> Sequence[Tensor]:
        batch = now.batch
        if op.crosses:
            assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
            batch = batch.cross.seen
        attend = self._attends[spec_of(op, self.program)]
        rotation = None if op.encoding is None else op.encoding.rotation()
        heads = q.unflatten(-1, (op.heads, op.head_dim))
        y = attend(heads, now.layer(op.layer), batch, now.bias(op.encoding), rotation)
        return (y.flatten(1),)


@dataclass(frozen=True, slots=True)
class _Step:
    op: Op
    compute: Callable[..., Sequence[Tensor]]
    reads: Sequence[str]
    writes: Sequence[str]
    dies: Sequence[str]  # values that nothing reads any more
    part: Part


def spec_of(op: Attend, program: Program) -> AttentionSpec:
    return AttentionSpec(
        heads=op.heads,
        kv_heads=op.kv_heads,
        head_dim=op.head_dim,
        scale=op.scale,
        dtype=program.dtype,
        device=program.device,
        window=op.window,
        causal=op.causal,
    )


def norm(op: Norm, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Over each `op.width` columns of x [T, width]; in float32 or wider."""
    groups = x.unflatten(-1, (-1, op.width))
    if op.centred:
        return F.layer_norm(groups, (op.width,), weight, bias, op.eps).flatten(1)
    return F.rms_norm(groups, (op.width,), weight, op.eps).flatten(1)


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """y = x · weightᵀ + bias; x [T, inputs] → [T, outputs].

    Only weights are rounded: sums have the input's precision or wider. Of the CPU kernels, those
    for processors that multiply 8-bit integers round x, too.
    """
    match weight:
        case Int8():
            # The scale as a power of two times a rest from 1 to 2. The power goes into the product,
            # where it is exact and keeps sums as small as y: float16 could not hold sums of the
            # integers themselves.
            rest = 2 * weight.scale.frexp().mantissa
            power = weight.scale / rest
            y = F.linear(x, weight.rounded * power.to(x.dtype)[:, None]).float() * rest
            return (y if bias is None else y + bias).to(x.dtype)
        case Int4():
            return F.linear(x, weight.widened().to(x.dtype), bias)
        case _:
            return F.linear(x, weight, bias)


def embedded(encoding: PositionalEncoding, x: Tensor, positions: Tensor) -> Tensor:
    """x [T, width] with the encoding's part, contiguous. Raises EncodingError for another dtype."""
    y = encoding.embed(x, positions)
    if y.dtype is not x.dtype:
        raise EncodingError(
            f"embed of {type(encoding).__name__} returns {y.dtype} for {x.dtype}; "
            "end it with .to(x.dtype)"
        )
    return y.contiguous()  # as kernels read it, and an encoding may leave it otherwise


def rotated(
    encoding: PositionalEncoding, q: Tensor, k: Tensor, batch: ForwardBatch
) -> tuple[Tensor, Tensor]:
    """q and k [T, heads, head_dim]. Raises EncodingError for another dtype or shape."""
    found = tuple(encoding.rotate(q, k, batch.positions, batch.offsets))
    for before, after in zip((q, k), found, strict=True):
        if (after.dtype, after.shape) != (before.dtype, before.shape):
            raise EncodingError(
                f"rotate of {type(encoding).__name__} returns {after.dtype} "
                f"{list(after.shape)} for {before.dtype} {list(before.shape)}; it must keep "
                "dtype and shape"
            )
    q, k = found
    return q, k


def _place(op: Place, now: Pass, x: Tensor) -> Sequence[Tensor]:
    return (embedded(op.encoding, x, now.batch.positions),)


def _clip(op: Clip, now: Pass, *values: Tensor) -> Sequence[Tensor]:
    return tuple(each.clamp(-op.most, op.most) for each in values)


def _rotate(op: Rotate, now: Pass, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    heads = (each.unflatten(-1, (-1, op.head_dim)) for each in (q, k))
    return tuple(each.flatten(1) for each in rotated(op.encoding, *heads, now.batch))


def _store(op: Store, now: Pass, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    k, v = (each.unflatten(-1, (-1, op.head_dim)) for each in (k, v))
    now.layer(op.layer).write(k, v, now.batch.slots)
    return ()


def _gate(op: Gate, now: Pass, gate: Tensor, up: Tensor) -> Sequence[Tensor]:
    return (ACTIVATIONS[op.activation](gate) * up,)


def _activate(op: Activate, now: Pass, x: Tensor) -> Sequence[Tensor]:
    return (ACTIVATIONS[op.activation](x),)


def _scale(op: Scale, now: Pass, x: Tensor) -> Sequence[Tensor]:
    return (x * op.factor,)


def _add(op: Add, now: Pass, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return (x + y,)


def _keep(op: Keep, now: Pass, *values: Tensor) -> Sequence[Tensor]:
    return tuple(each[now.batch.output_rows] for each in values)
