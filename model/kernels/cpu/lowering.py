"""A program as C++ reads it: each op with its packed weights, each value with its place in memory.

Done once, before the first pass. What is fused is decided here, and what only Python can compute.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

from torch import Tensor

from ropewalk.cache.types import KeyStorage
from ropewalk.model.attention.base import Attend as AttendPaged
from ropewalk.model.attention.base import AttentionBackend
from ropewalk.model.config import Activation
from ropewalk.model.encodings.base import (
    MaterialisedBias,
    PairBias,
    PositionalEncoding,
    inherits,
    rotates,
)
from ropewalk.model.encodings.rope import tables_of
from ropewalk.model.kernels.cpu.attention import CpuAttention
from ropewalk.model.kernels.cpu.bindings import (
    Columns,
    Kernels,
    LinearArguments,
    NormArguments,
    OpArguments,
    in_strips,
)
from ropewalk.model.layers.executor import spec_of
from ropewalk.model.program import (
    Activate,
    Add,
    AskQuery,
    Attend,
    Clip,
    Embed,
    Forget,
    Gate,
    Keep,
    Linear,
    MixExperts,
    Norm,
    Op,
    Part,
    Place,
    Program,
    Rotate,
    Scale,
    ScaleQueries,
    SoftCap,
    Store,
    live_after,
    part_of,
)
from ropewalk.model.weights.quantize import Int4, Int8, Weight


class Kind(IntEnum):
    """Numbered as in program.hpp."""

    EMBED = 0
    PLACE = 1
    NORM = 2
    LINEAR = 3
    CLIP = 4
    ROTATE = 5
    STORE = 6
    ATTEND = 7
    GATE = 8
    ACTIVATE = 9
    SCALE = 10
    ADD = 11
    KEEP = 12
    COPY = 13
    FORGET = 14
    SOFT_CAP = 15
    MIX_EXPERTS = 16
    SCALE_QUERIES = 17


KNOWN = {  # what `_lower` has a case for
    each.__name__
    for each in (
        *(Embed, Place, Norm, Linear, Clip, Forget, ScaleQueries, Rotate, Store),
        *(AskQuery, Attend, Gate, Activate, Scale, SoftCap, Add, Keep, MixExperts),
    )
}
EACH_ROW, RUN, RESULT = 0, 1, 2  # program.hpp's codes for where a value lies
# Numbered as in linear/outputs.hpp.
ACTIVATIONS: Mapping[Activation | None, int] = {
    None: 0,
    "silu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "relu": 4,
}


def in_python(op: Op) -> bool:
    """Whether only the encoding's own code can compute it."""
    match op:
        case Place(encoding=encoding):
            return embeds_in_python(encoding)
        case Forget(encoding=encoding):
            return gates_in_python(encoding)
        case AskQuery():
            return True
        case Rotate(encoding=encoding, head_dim=head_dim):
            return rotates_in_python(encoding, head_dim)
    return False


def is_dense(op: Op) -> bool:
    """Whether its bias is computed anew in every step, for every row and key."""
    if not isinstance(op, Attend) or op.encoding is None:
        return False
    return biases_in_python(op.encoding)


def embeds_in_python(encoding: PositionalEncoding) -> bool:
    return not inherits("embed", encoding)


def gates_in_python(encoding: PositionalEncoding) -> bool:
    return not inherits("gates", encoding)


def rotates_in_python(encoding: PositionalEncoding, head_dim: int) -> bool:
    """head_dim: of the queries and keys."""
    return rotates(encoding) and tables_of(encoding, head_dim) is None


def biases_in_python(encoding: PositionalEncoding) -> bool:
    return isinstance(encoding.score_bias(), MaterialisedBias | PairBias)


@dataclass(eq=False, slots=True)
class Value:
    """A value of the program. Until `placed`, it has no place."""

    width: int
    ops: list[int]  # the one that makes it, and the last one that reads it
    segments: list[int]  # theirs: a segment's ops lie between two that look at all rows
    where: int = RUN
    start: int = 0

    def within(self) -> range:
        """The ops before which it is there."""
        return range(self.ops[0] + 1, self.ops[1] + 1)

    @property
    def life(self) -> list[int]:
        """From when to when its room is taken. Threads do a segment each at another pace."""
        return self.ops if self.where == RUN else self.segments


@dataclass(frozen=True, slots=True)
class Span:
    """Some columns of a value."""

    value: Value
    first: int
    count: int

    @property
    def whole(self) -> bool:
        return self.count == self.value.width

    def columns(self) -> Columns:
        value = self.value
        return Columns(value.start, value.width, self.first, self.count, value.where)


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops of one call; or an op that Python computes, and the values that it replaces.

    dense: the encoding whose dense bias has to be built before.
    """

    which: range
    dense: PositionalEncoding | None = None
    op: Op | None = None
    parts: Sequence[Span] = ()
    attend: AttendPaged | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A list of ops as C++ reads it."""

    ops: "Array[OpArguments]"
    stages: Sequence[Stage]
    attends: Sequence[tuple[CpuAttention, Attend]]  # the kinds of attention
    each_row: int  # elements of scratch per row
    run: int
    held: Mapping[str, Tensor]  # what the ops point to
    layers: Sequence["Array[LinearArguments]"]  # of experts, likewise
    borrowed: Sequence[Tensor]  # and what of that is the encodings'
    keeps: bool  # whether only some rows are wanted in the end
    columns: int  # of the result

    @property
    def dense(self) -> bool:
        return any(stage.dense is not None for stage in self.stages)


def lower(
    program: Program, ops: Sequence[Op], kernels: Kernels, backend: AttentionBackend | None = None
) -> Lowered:
    """Fuse what can be fused, give every value a place, and pack the weights.

    backend: as in CpuExecutor.
    """
    return Lowering(program, fused(ops), kernels, backend).done()


def without_head(lowered: Lowered) -> Lowered:
    """The same up to the head, in the last stage: what that reads is the result, as it is."""
    at = next(index for index, op in enumerate(lowered.ops) if op.to.where == RESULT)
    head, last = lowered.ops[at], lowered.stages[-1]
    copy = OpArguments(
        kind=Kind.COPY,
        part=head.part,
        kept=head.kept,
        begins=head.begins,
        x=head.x,
        to=Columns(0, head.x.count, 0, head.x.count, RESULT),
    )
    ops = (OpArguments * (at + 1))(*lowered.ops[:at], copy)
    stages = [*lowered.stages[:-1], replace(last, which=range(last.which.start, at + 1))]
    return replace(lowered, ops=ops, stages=stages, columns=head.x.count)


@dataclass(frozen=True, slots=True)
class Fused(Op):
    """A linear layer with the activation after it; gated, of the first half of its outputs, times
    the other half."""

    linear: Linear
    activation: Activation
    gated: bool


def fused(ops: Sequence[Op]) -> list[Op]:
    """Linear layers with their activations: the kernel applies one before it stores an output."""
    found: list[Op] = []
    live = live_after(ops)
    for index, op in enumerate(ops):
        before = found[-1] if found else None
        if (
            isinstance(op, Gate | Activate)
            and isinstance(before, Linear)
            and before.writes == op.reads
            and not set(op.reads.split()) & live[index] - set(op.writes.split())
        ):
            gated = isinstance(op, Gate)
            found[-1] = Fused(before.reads, op.writes, before, op.activation, gated)
        else:
            found.append(op)
    return found


@dataclass(slots=True)
class Emitted:
    index: int  # of the program's op
    kind: Kind
    part: Part
    kept: bool
    columns: dict[str, Span]
    more: dict[str, object]


class Lowering:
    """Walks the ops once, and remembers where each name's value is meanwhile."""

    def __init__(
        self,
        program: Program,
        ops: Sequence[Op],
        kernels: Kernels,
        backend: AttentionBackend | None,
    ) -> None:
        self.program, self.kernels, self.backend = program, kernels, backend
        self.emitted: list[Emitted] = []
        self.values: list[Value] = []
        self.held: dict[str, Tensor] = {}
        self.borrowed: list[Tensor] = []
        self.layers: list[Array[LinearArguments]] = []
        self.kinds: list[tuple[CpuAttention, Attend]] = []
        self.stages: list[Stage] = []
        self.named: dict[str, Span] = {}
        self.live = live_after(ops)
        self.last_store = max((i for i, op in enumerate(ops) if isinstance(op, Store)), default=-1)
        self.index = self.segment = self.begun = 0
        self.kept = False
        self.dense: PositionalEncoding | None = None
        for self.index, op in enumerate(ops):
            alone = self.looks_around(op)
            self.segment += alone
            self._lower(op)
            self.segment += alone and not isinstance(op, Keep)

    def looks_around(self, op: Op) -> bool:
        """Whether it looks at other rows than its own, or is none of the kernels'.

        Experts are picked for all rows, so that the weights of each are read once.
        """
        return isinstance(op, Attend | Keep | MixExperts) or in_python(op)

    def done(self) -> Lowered:
        self._end_stage()
        sizes = {
            where: placed([each for each in self.values if each.where == where])
            for where in (EACH_ROW, RUN)
        }
        ops = (OpArguments * len(self.emitted))(*map(_arguments, self.emitted))
        inside = {index for each in self.values if each.where == RUN for index in each.within()}
        for (before, after), op in zip(pairwise(self.emitted), ops[1:], strict=True):
            op.begins = after.index != before.index and after.index not in inside
        result = self.named.get("logits")
        return Lowered(
            ops,
            self.stages,
            self.kinds,
            each_row=sizes[EACH_ROW],
            run=sizes[RUN],
            held=self.held,
            layers=self.layers,
            borrowed=self.borrowed,
            keeps=self.kept,
            columns=0 if result is None else result.count,
        )

    # ------------------------------------------------------------------------------- values

    def read(self, name: str, *, whole: bool = False) -> Span:
        """Where a value is; whole: copied, if it is only some columns of another one."""
        part = self.named[name]
        value = part.value
        value.ops[1], value.segments[1] = self.index, self.segment
        if value.segments[0] != self.segment and value.where == RUN:
            value.where = EACH_ROW
        if whole and not part.whole:
            copy = self._new(part.count)
            copy.value.where, copy.value.segments[0] = EACH_ROW, self.segment - 1
            self.emit(Kind.COPY, Part.STORE, x=part, to=copy)
            part = self.named[name] = copy
        return part

    def write(self, name: str, width: int) -> Span:
        part = self.named[name] = self._new(width)
        if name == "logits":
            part.value.where = RESULT
        return part

    def _new(self, width: int) -> Span:
        value = Value(width, [self.index] * 2, [self.segment] * 2)
        self.values.append(value)
        return Span(value, 0, width)

    def in_place(self, op: Op) -> list[Span]:
        """Of an op that may overwrite what it reads: copied first if it is still needed."""
        parts = []
        for name, to in zip(op.reads.split(), op.writes.split(), strict=True):
            part = self.read(name)
            if to != name:
                copy = self.write(to, part.count)
                self.emit(Kind.COPY, part_of(op), x=part, to=copy)
                part = copy
            parts.append(part)
        return parts

    def emit(self, kind: Kind, part: Part, **more: object) -> None:
        columns = {name: each for name, each in more.items() if isinstance(each, Span)}
        others = {name: each for name, each in more.items() if not isinstance(each, Span)}
        self.emitted.append(Emitted(self.index, kind, part, self.kept, columns, others))

    def _end_stage(self) -> None:
        if self.begun < len(self.emitted):
            self.stages.append(Stage(range(self.begun, len(self.emitted)), self.dense))
            self.begun, self.dense = len(self.emitted), None

    # ---------------------------------------------------------------------------------- ops

    def _lower(self, op: Op) -> None:
        if in_python(op):
            self._end_stage()
            parts = self.in_place(op) if op.writes else list(map(self.read, op.reads.split()))
            self.stages.append(Stage(range(0), op=op, parts=parts))
            return
        if isinstance(op, Attend) and self.backend is not None:
            self._end_stage()
            parts = [self.read(op.reads), self._found(op)]
            attend = self.backend(spec_of(op, self.program))
            self._kind(op)  # for what stores keys
            self.stages.append(Stage(range(0), op=op, parts=parts, attend=attend))
            return
        part = part_of(op) if not isinstance(op, Fused) else part_of(op.linear)
        match op:
            case Embed():
                table = self.hold(f"{op.name}.weight", self.program.full(f"{op.name}.weight"))
                to = self.write(op.writes, op.width)
                self.emit(Kind.EMBED, part, to=to, table=table, rows=op.vocab)
            case Place():
                (x,) = self.in_place(op)
                vectors = op.encoding.vectors()
                if vectors is not None:
                    table = self.borrow("position vectors", vectors.table)
                    self.emit(Kind.PLACE, part, x=x, vectors=table, number=vectors.scale)
            case Norm():
                self._norm(op)
            case Linear():
                self._linear(op, None, False)
            case Fused():
                self._linear(op.linear, op.activation, op.gated, op.writes)
            case MixExperts():
                self._mix_experts(op)
            case Clip():
                for x in self.in_place(op):
                    self.emit(Kind.CLIP, part, x=x, number=op.most)
            case Forget():
                gates = op.encoding.forget_gates()
                assert gates is not None, "only layers with gates have this op"
                self.emit(
                    Kind.FORGET,
                    part,
                    x=self.read(op.reads),
                    table=self.borrow("gates", gates.weight),
                    vectors=self.borrow("gates", gates.bias),
                    rows=len(gates.bias),
                    layer=op.layer,
                )
            case ScaleQueries():
                (x,) = self.in_place(op)
                scales = op.encoding.query_scales()
                assert scales is not None, "only layers with scales have this op"
                self.emit(
                    Kind.SCALE_QUERIES,
                    part,
                    x=x,
                    vectors=self.borrow("query scales", scales),
                    rows=scales.shape[1],
                    head_dim=op.head_dim,
                )
            case Rotate():
                self._rotate(op)
            case Store():
                self._store(op)
            case Attend():
                self._attend(op)
            case Gate():
                gate, up = map(self.read, op.reads.split())
                to, activation = self.write(op.writes, up.count), ACTIVATIONS[op.activation]
                self.emit(Kind.GATE, part, x=gate, y=up, to=to, activation=activation)
            case Activate():
                x = self.read(op.reads)
                to, activation = self.write(op.writes, x.count), ACTIVATIONS[op.activation]
                self.emit(Kind.ACTIVATE, part, x=x, to=to, activation=activation)
            case Scale():
                (x,) = self.in_place(op)
                self.emit(Kind.SCALE, part, x=x, number=op.factor)
            case SoftCap():
                (x,) = self.in_place(op)
                self.emit(Kind.SOFT_CAP, part, x=x, number=op.most)
            case Add():
                first, second = op.reads.split()
                x, y = self.read(first), self.read(second)
                to = x if op.writes == first else self.write(op.writes, x.count)
                self.emit(Kind.ADD, part, x=x, y=y, to=to)
            case Keep():
                self.kept = True
                for name in op.reads.split():
                    x = self.read(name)
                    self.emit(Kind.KEEP, part, x=x, to=self.write(name, x.count))

    def _norm(self, op: Norm) -> None:
        x = self.read(op.reads)
        to = x if op.writes == op.reads else self.write(op.writes, x.count)
        bias = self.program.bias(op)
        norm = NormArguments(
            weight=self.hold(f"{op.name}.weight", self.program.full(f"{op.name}.weight").float()),
            bias=None if bias is None else self.hold(f"{op.name}.bias", bias.float()),
            centred=op.centred,
        )
        self.emit(Kind.NORM, Part.NORM, x=x, to=to, norm=norm, head_dim=op.width, number=op.eps)

    def _linear(
        self, op: Linear, activation: Activation | None, gated: bool, writes: str = ""
    ) -> None:
        weight, bias = self.program.weights[f"{op.name}.weight"], self.program.bias(op)
        linear, packed = pack(weight, bias, self.kernels, activation, gated)
        self.held |= {f"{op.name}.{name}": tensor for name, tensor in packed.items()}
        x = self.read(op.reads, whole=True)
        names = (writes or op.writes).split()
        if len(names) == 1:
            to = self.write(names[0], linear.outputs)
        else:
            to, first = self._new(linear.outputs), 0
            for name, count in zip(names, op.outputs, strict=True):
                self.named[name] = Span(to.value, first, count)
                first += count
        self.emit(Kind.LINEAR, op.part, x=x, to=to, linear=linear)

    def _mix_experts(self, op: MixExperts) -> None:
        x, experts = self.read(op.reads, whole=True), op.experts
        router = f"{op.name}.router.weight"
        linear, held = pack(self.program.full(router), None, self.kernels)
        self.held |= {f"{router}.{name}": tensor for name, tensor in held.items()}
        scores = self._new(experts.count)
        scores.value.where, scores.value.segments[0] = EACH_ROW, self.segment - 1
        self.emit(Kind.LINEAR, Part.LINEAR, x=x, to=scores, linear=linear)
        layers = (LinearArguments * (2 * experts.count))()
        for expert in range(experts.count):
            for part, own in enumerate(op.linears(expert)):
                weight = self.program.weights[f"{own.name}.weight"]
                gating = (op.activation, True) if part == 0 else (None, False)
                layers[2 * expert + part], held = pack(weight, None, self.kernels, *gating)
                self.held |= {f"{own.name}.{name}": tensor for name, tensor in held.items()}
        self.layers.append(layers)
        to = self.write(op.writes, op.inputs)
        to.value.where = EACH_ROW
        self.emit(
            Kind.MIX_EXPERTS,
            Part.LINEAR,
            x=x,
            y=scores,
            to=to,
            experts=layers,
            rows=experts.count,
            used=experts.used,
            normalized=experts.normalized,
        )

    def _rotate(self, op: Rotate) -> None:
        q, k = self.in_place(op)
        rope = tables_of(op.encoding, op.head_dim)
        if rope is None or rope.key_storage is KeyStorage.RAW:
            return
        by_offset = rope.key_storage is KeyStorage.BLOCK
        self.emit(
            Kind.ROTATE,
            Part.POSITION,
            **({"x": k} if by_offset else {"x": q, "y": k}),
            cosines=self.borrow("cosines", rope.cos),
            sines=self.borrow("sines", rope.sin),
            pairs=rope.cos.shape[1],
            interleaved=rope.layout == "interleaved",
            by_offset=by_offset,
            head_dim=op.head_dim,
        )

    def _store(self, op: Store) -> None:
        """Queries beside these keys are copied to where attention finds them, on the way."""
        names = op.reads.split()
        k, v = map(self.read, names)
        columns = {"x": k, "y": v}
        beside = [
            name for name in self.live[self.index] - {*names} if self.named[name].value is k.value
        ]
        if len(beside) == 1:
            columns["z"] = self.read(beside[0])
            columns["to"] = self.write(beside[0], columns["z"].count)
        self.emit(Kind.STORE, Part.STORE, **columns, layer=op.layer, attends=0)

    def _attend(self, op: Attend) -> None:
        q, to = self.read(op.reads, whole=True), self._found(op)
        if is_dense(op) and op.encoding is not self._last_dense():
            self._end_stage()
            self.dense = op.encoding
        heedless = self.index > self.last_store
        self.emit(
            Kind.ATTEND,
            Part.ATTENTION,
            x=q,
            to=to,
            layer=op.layer,
            attends=self._kind(op),
            heedless=heedless,
        )

    def _found(self, op: Attend) -> Span:
        to = self.write(op.writes, op.num_heads * op.head_dim)
        to.value.where = EACH_ROW
        return to

    def _last_dense(self) -> PositionalEncoding | None:
        """The encoding whose dense bias is there already."""
        built = [stage.dense for stage in self.stages if stage.dense is not None]
        return self.dense or (built[-1] if built else None)

    def _kind(self, op: Attend) -> int:
        """Layers with equal attention are of one kind: most models have one or two."""
        made = CpuAttention(spec_of(op, self.program), self.kernels)
        for index, (attend, first) in enumerate(self.kinds):
            plain = made.spec.bias is None and made.spec.storage is None
            alike = plain or first.encoding is op.encoding
            if attend.spec == made.spec and alike and first.crosses == op.crosses:
                return index
        self.kinds.append((made, op))
        return len(self.kinds) - 1

    def hold(self, name: str, tensor: Tensor) -> int:
        """Keep a weight alive; returns its address."""
        tensor = self.held[name] = tensor.detach().contiguous()
        return tensor.data_ptr()

    def borrow(self, name: str, tensor: Tensor) -> int:
        """The same of a tensor that an encoding tells of itself, unless it has to be copied.

        As float32.
        """
        made = tensor.detach().float().contiguous()
        if made.data_ptr() != tensor.data_ptr():
            return self.hold(f"{name}.{len(self.held)}", made)
        self.borrowed.append(made)
        return made.data_ptr()


def pack(
    weight: Weight,
    bias: Tensor | None,
    kernels: Kernels,
    activation: Activation | None = None,
    gated: bool = False,
) -> tuple[LinearArguments, dict[str, Tensor]]:
    """A linear layer, and the tensors it points to. Each row's sum is independent of other rows.

    Where the processor multiplies 8-bit integers, inputs of 8- or 4-bit weights are rounded to
    8 bits as well, in groups of 32 per row. gated: as in Fused.
    """
    order: Callable[[Tensor], Tensor] = in_strips if gated else Tensor.contiguous
    held: dict[str, Tensor] = {}
    match weight:
        case Int4():
            bits, held["panels"] = 4, kernels.pack_int4(weight, gated)
        case Int8():
            bits, held["panels"] = 8, kernels.pack(weight.rounded, gated)
            held["scale"] = order(weight.scale)
        case _:
            bits, held["panels"] = 0, kernels.pack(weight, gated)
    if bias is not None:
        held["bias"] = order(bias.float())
    outputs, inputs = weight.shape
    pointers = {"packed": held["panels"].data_ptr()} | {
        name: held[name].data_ptr() for name in ("scale", "bias") if name in held
    }
    arguments = LinearArguments(
        **pointers,
        inputs=inputs,
        outputs=outputs // 2 if gated else outputs,
        bits=bits,
        gated=gated,
        activation=ACTIVATIONS[activation],
    )
    return arguments, held


def placed(values: Sequence[Value]) -> int:
    """Give each value the first room that is free for its life. Returns how much all take."""
    taken: list[Value] = []
    size = 0
    for value in values:  # in the order in which they are made
        taken = [each for each in taken if each.life[1] >= value.life[0]]
        for other in sorted(taken, key=lambda each: each.start):
            if value.start + value.width <= other.start:
                break
            value.start = max(value.start, other.start + other.width)
        taken.append(value)
        size = max(size, value.start + value.width)
    return size


def _arguments(op: Emitted) -> OpArguments:
    columns = {name: part.columns() for name, part in op.columns.items()}
    return OpArguments(kind=op.kind, part=op.part, kept=op.kept, **columns, **op.more)
