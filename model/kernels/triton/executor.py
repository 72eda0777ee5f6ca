"""Runs programs on a GPU, with few launches: a small model waits for these.

Of few rows, a linear layer computes all that stands around it: norm, activation, residual. Of more,
each addition and the norm after it are one launch. Rotating and storing is always one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.model.config import Activation
from ropewalk.model.encodings.base import inherits, rotates
from ropewalk.model.encodings.rope import tables_of
from ropewalk.model.kernels.triton.attention import TritonAttention
from ropewalk.model.kernels.triton.launches import (
    FEW_ROWS,
    TritonExperts,
    TritonForget,
    TritonGate,
    TritonLinear,
    TritonNorm,
    TritonStore,
)
from ropewalk.model.layers.executor import (
    Pass,
    Step,
    TorchExecutor,
    in_heads,
    routed,
    spec_of,
)
from ropewalk.model.program import (
    Activate,
    Add,
    Attend,
    Forget,
    Gate,
    Linear,
    MixExperts,
    Norm,
    Op,
    Part,
    Program,
    Rotate,
    Store,
    linears_of,
    live_after,
)
from ropewalk.model.weights.quantize import Int4, Int8


@dataclass(frozen=True, slots=True)
class RotateStore(Op):
    """Rotate, then Store. Reads q k v and writes q."""

    rotate: Rotate
    store: Store
    part: Part = Part.STORE


@dataclass(frozen=True, slots=True)
class AddNorm(Op):
    """Add, then Norm of the sum. Reads both values and writes the sum and its norm."""

    norm: Norm
    part: Part = Part.NORM


@dataclass(frozen=True, slots=True)
class Around(Op):
    """A linear layer with what stands before and after it; adds the second value read, if any."""

    linear: Linear
    few: bool  # whether for few rows: in one launch
    norm: Norm | None = None
    activation: Activation | None = None
    gated: bool = False
    part: Part = Part.LINEAR


def why_not(program: Program) -> str | None:
    """Why a program cannot be run here at all."""
    specs = [spec_of(op, program) for op in program.ops if isinstance(op, Attend)]
    return next(filter(None, map(TritonAttention.why_not, specs)), None)


class TritonExecutor(TorchExecutor):
    """As TorchExecutor, op by op, of which some are fused."""

    name = "triton"

    def __init__(self, program: Program, few_rows: int = FEW_ROWS) -> None:
        """few_rows: how many rows are few."""
        self._stores: list[TritonStore] = []
        self._experts: list[TritonExperts] = []
        self.few_rows = few_rows
        super().__init__(program, TritonAttention)
        experts = [op for op in program.ops if isinstance(op, MixExperts)]
        self.recordable = all(map(self._picks_on_device, experts))
        self.rotates_apart = all(store.rope is None for store in self._stores)

    def fixed_tensors(self) -> dict[str, Tensor]:
        found = super().fixed_tensors()
        for index, store in enumerate(self._stores):
            found |= {
                f"rotation.{index}.{name}": own for name, own in store.fixed_tensors().items()
            }
        for index, layer in enumerate(self._experts):
            found |= {f"experts.{index}.{name}": own for name, own in layer.addresses.items()}
        return found

    def _compiled(
        self, ops: Sequence[Op], results: Sequence[str]
    ) -> Callable[[int], Sequence[Step]]:
        many, few = (
            self._steps(_fused(ops, results, takes), results)
            for takes in (lambda linear: False, self._takes)
        )
        return lambda rows: few if 0 < rows <= self.few_rows else many

    def _takes(self, linear: Linear) -> bool:
        """Whether a launch of its own can compute it for few rows."""
        weight = self.program.weights[f"{linear.name}.weight"]
        return self.program.dtype in TritonLinear.DTYPES and not isinstance(weight, Int4)

    def _how(self, op: Op) -> Callable[..., Sequence[Tensor]]:
        match op:
            case RotateStore():
                return self._rotate_store(op)
            case Forget(encoding=encoding) if inherits("gates", encoding):
                gates = encoding.forget_gates()
                assert gates is not None, "only layers with gates have this op"
                return self._forget(TritonForget(gates))
            case MixExperts() if self._picks_on_device(op):
                return self._mix_on_device(op)
            case AddNorm():
                norm = self._of_norm(op.norm)
                return lambda op, now, x, added: norm(x, added)
            case Norm(width=width) if width == self.program.config.hidden_size:
                lone = self._of_norm(op)
                # A head may be as wide as the residual stream.
                return lambda op, now, x: (
                    lone(x.contiguous().view(-1, op.width))[1].view(x.shape),
                )
            case Around(few=True):
                return self._around(op)
            case Around():
                gate, linear = TritonGate(_needed(op.activation)), super()._how(op.linear)
                return lambda op, now, x: (gate(_joined(linear(op.linear, now, x))),)
        return super()._how(op)

    def _rotate_store(self, op: RotateStore) -> Callable[..., Sequence[Tensor]]:
        encoding, dim = op.rotate.encoding, op.rotate.head_dim
        store = TritonStore(tables_of(encoding, dim))
        self._stores.append(store)

        def compute(op: RotateStore, now: Pass, *values: Tensor) -> Sequence[Tensor]:
            q, k, v = (in_heads(each, dim) for each in values)
            return (store(q, k, v, now.batch, now.layer(op.store.layer)).flatten(1),)

        return compute

    def _forget(self, forget: TritonForget) -> Callable[..., Sequence[Tensor]]:
        def compute(op: Forget, now: Pass, x: Tensor) -> Sequence[Tensor]:
            forget(x, now.batch, now.layer(op.layer))
            return ()

        return compute

    def _picks_on_device(self, op: MixExperts) -> bool:
        """Whether the host need not know which experts are picked."""
        weights = (self.program.weights[f"{each.name}.weight"] for each in linears_of([op]))
        return not any(isinstance(weight, Int4) for weight in weights)

    def _mix_on_device(self, op: MixExperts) -> Callable[..., Sequence[Tensor]]:
        up, down = (
            TritonExperts([self._not_in_4_bits(layer) for layer in layers])
            for layers in zip(*map(op.linears, range(op.experts.count)), strict=True)
        )
        self._experts += up, down
        router = self.program.full(f"{op.name}.router.weight")

        def compute(op: MixExperts, now: Pass, x: Tensor) -> Sequence[Tensor]:
            if now.batch.max_query > 1:  # a prompt has many rows for each expert
                return self._mix_experts(op, now, x)
            shares, picked = routed(op.experts, F.linear(x, router))
            found = down(up(x, picked, op.activation), picked)
            mixed = (found.view(*picked.shape, -1) * shares[..., None]).sum(dim=1)
            return (mixed.to(x.dtype),)

        return compute

    def _not_in_4_bits(self, linear: Linear) -> Tensor | Int8:
        weight = self.program.weights[f"{linear.name}.weight"]
        assert not isinstance(weight, Int4)
        return weight

    def _of_norm(self, norm: Norm) -> TritonNorm:
        weight = self.program.full(f"{norm.name}.weight")
        return TritonNorm(norm, weight, self.program.bias(norm))

    def _around(self, op: Around) -> Callable[..., Sequence[Tensor]]:
        linear = TritonLinear(self._not_in_4_bits(op.linear), self.program.bias(op.linear))
        norm = None if op.norm is None else self._of_norm(op.norm)
        outputs = op.linear.outputs if op.activation is None else ()

        def compute(
            op: Around, now: Pass, x: Tensor, added: Tensor | None = None
        ) -> Sequence[Tensor]:
            y = linear(
                x.contiguous(), norm=norm, activation=op.activation, gated=op.gated, added=added
            )
            return (y,) if len(outputs) < 2 else torch.split(y, list(outputs), dim=-1)

        return compute


def _needed(activation: Activation | None) -> Activation:
    assert activation is not None
    return activation


def _fused(ops: Sequence[Op], results: Sequence[str], takes: Callable[[Linear], bool]) -> list[Op]:
    """takes: whether a linear layer is computed with what stands around it."""
    left, live = list(ops), live_after(ops, results)
    found: list[Op] = []
    while left:
        op, *others = left
        done = len(ops) - len(left)
        made = _first(op, others, live[done:], takes)
        fused, count = made if made is not None else (op, 1)
        found.append(fused)
        left = left[count:]
    return found


def _first(
    op: Op, others: Sequence[Op], live: Sequence[frozenset[str]], takes: Callable[[Linear], bool]
) -> tuple[Op, int] | None:
    """What the first ops become together, and how many they are. live: after each of them."""
    after = others[0] if others else None
    match op, after:
        case Rotate(), Store() if _stores_rotated(op, after) and not _read(after.reads, live[1]):
            (q, k), v = op.reads.split(), after.reads.split()[1]
            return RotateStore(f"{q} {k} {v}", q, op, after), 2
        case Add(), Norm() if after.reads == op.writes and not _few(others[1:], takes):
            return AddNorm(op.reads, f"{op.writes} {after.writes}", after), 2
        case Norm(centred=False), Linear() if (
            after.reads == op.writes and takes(after) and op.writes not in live[1]
        ):
            fused, count = _with_after(after, others[1:], live[1:], op)
            return fused, count + 1
        case Linear(), _ if takes(op):
            return _with_after(op, others, live, None)
        case Linear(), Gate() if after.reads == op.writes and not _read(after.reads, live[1]):
            made = Around(
                op.reads, after.writes, op, False, activation=after.activation, part=op.part
            )
            return made, 2
    return None


def _with_after(
    linear: Linear, others: Sequence[Op], live: Sequence[frozenset[str]], norm: Norm | None
) -> tuple[Around, int]:
    """A linear layer of few rows with the activation or addition that follows it."""
    reads = linear.reads if norm is None else norm.reads
    around = partial(Around, linear=linear, few=True, norm=norm, part=linear.part)
    match others:
        case [Gate() | Activate() as act, *_] if act.reads == linear.writes and not _read(
            act.reads, live[1] - {act.writes}
        ):
            gated = isinstance(act, Gate)
            return around(reads, act.writes, activation=act.activation, gated=gated), 2
        case [Add() as add, *_] if norm is None and linear.writes not in live[1]:
            first, second = add.reads.split()
            if second == linear.writes:
                return around(f"{reads} {first}", add.writes), 2
    return around(reads, linear.writes), 1


def _few(others: Sequence[Op], takes: Callable[[Linear], bool]) -> bool:
    """Whether a linear layer computes the norm before it, so that nothing else should."""
    return bool(others) and isinstance(others[0], Linear) and takes(others[0])


def _stores_rotated(rotate: Rotate, store: Store) -> bool:
    tables = tables_of(rotate.encoding, rotate.head_dim)
    can = tables is not None or not rotates(rotate.encoding)
    return can and store.reads.split()[0] == rotate.writes.split()[1]


def _read(names: str, live: frozenset[str]) -> bool:
    return not live.isdisjoint(names.split())


def _joined(halves: Sequence[Tensor]) -> Tensor:
    """Neighbouring columns of one tensor, as that tensor."""
    first = halves[0]
    return first.as_strided((len(first), first.stride(0)), first.stride())
