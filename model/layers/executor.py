"""Runs programs op by op in torch: the definition, the oracle, and what training differentiates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.kv import KVCache, PagedKV
from ropewalk.model.attention.base import Attend as AttendPaged
from ropewalk.model.attention.base import (
    AttentionBackend,
    AttentionSpec,
    StepBias,
    capped,
    of_encoding,
    step_bias,
)
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import Activation, Experts
from ropewalk.model.encodings.base import (
    EncodingError,
    PositionalEncoding,
    QueryBias,
    asks_query,
    forgets,
)
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
from ropewalk.model.watch import Watch
from ropewalk.model.weights.quantize import Int4, Int8, Weight

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
    of_queries: QueryBias | None = None  # of the layer that is computed, if its encoding has one

    def layer(self, index: int) -> PagedKV:
        if index not in self.layers:
            self.layers[index] = self.kv.layer(index)
        return self.layers[index]

    def bias(self, encoding: PositionalEncoding | None) -> StepBias | None:
        """What the encoding adds to scores. Only the last one is kept: it may be dense."""
        if encoding is None:
            return None
        if asks_query(encoding):
            return self.of_queries
        if self.biased is None or self.biased[0] is not encoding:
            self.biased = None  # freed before the next is built
            self.biased = encoding, step_bias(encoding, self.batch, self.kv.block_size)
        return self.biased[1]


class TorchExecutor:
    """Attention is a backend's. Called with a batch in host memory or on the program's device."""

    name = "torch"
    recordable = False
    rounds_inputs = False
    rotates_apart = True

    def __init__(self, program: Program, backend: AttentionBackend) -> None:
        self.program = program
        self.backend = backend
        kept = next(i for i, op in enumerate(program.ops) if isinstance(op, Keep))
        before, after = program.ops[:kept], program.ops[kept:]
        self._prompts = self._compiled(program.prompt_ops, ())
        self._all_rows = self._compiled(before, after[0].reads.split())
        # Of the rows that are kept: the value that is wanted, and how it is found.
        hidden, head = program.head.reads, after.index(program.head)
        self._logits = "logits", self._compiled(after, ["logits"])
        self._hidden = hidden, self._compiled(after[:head], [hidden])

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Weights as they are read, besides those of encodings."""
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
            new = batch.cross.new
            _run(self._prompts(len(new.tokens)), Pass(new, kv), {}, watch)
        now = Pass(batch, kv)
        values: dict[str, Tensor] = {}
        wanted, kept_rows = self._hidden if batch.hidden else self._logits
        _run(self._all_rows(len(batch.tokens)), now, values, watch)
        _run(kept_rows(len(batch.output_rows)), now, values, watch)
        return values[wanted]

    @torch.inference_mode()
    def run(
        self, ops: Sequence[Op], which: range, now: Pass, values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Some of a list of the program's ops over `values`: those that are left, by name.

        For whoever looks at what happens inside a pass.
        """
        values = dict(values)
        _run(self._steps(ops, ())[which.start : which.stop], now, values, None)
        return values

    def _compiled(
        self, ops: Sequence[Op], results: Sequence[str]
    ) -> "Callable[[int], Sequence[Step]]":
        """The steps for so many rows."""
        steps = self._steps(ops, results)
        return lambda rows: steps

    def _steps(self, ops: Sequence[Op], results: Sequence[str]) -> "list[Step]":
        made = []
        for op, live in zip(ops, live_after(ops, results), strict=True):
            reads, writes = op.reads.split(), op.writes.split()
            dies = {*reads, *writes} - live
            made.append(Step(op, self._how(op), reads, writes, tuple(dies), part_of(op)))
        return made

    def _how(self, op: Op) -> Callable[..., Sequence[Tensor]]:
        """What computes an op: (op, pass, values read) → values written."""
        if isinstance(op, Attend):
            attend = self.backend(spec_of(op, self.program))
            return lambda op, now, q: (attended(op, attend, now, q),)
        known: dict[type[Op], Callable[..., Sequence[Tensor]]] = {
            Embed: self._embed,
            Norm: self._norm,
            Linear: self._linear,
            MixExperts: self._mix_experts,
            Place: _place,
            Clip: _clip,
            Forget: _forget,
            AskQuery: _ask_query,
            ScaleQueries: _scale_queries,
            Rotate: _rotate,
            Store: _store,
            Gate: _gate,
            Activate: _activate,
            Scale: _scale,
            SoftCap: _soft_cap,
            Add: _add,
            Keep: _keep,
        }
        return known[type(op)]

    def _embed(self, op: Embed, now: Pass) -> Sequence[Tensor]:
        return (F.embedding(now.batch.tokens, self.program.full(f"{op.name}.weight")),)

    def _norm(self, op: Norm, now: Pass, x: Tensor) -> Sequence[Tensor]:
        return (norm(op, self.program.full(f"{op.name}.weight"), self.program.bias(op), x),)

    def _linear(self, op: Linear, now: Pass, x: Tensor) -> Sequence[Tensor]:
        y = linear(x, self.program.weights[f"{op.name}.weight"], self.program.bias(op))
        return (y,) if len(op.outputs) == 1 else torch.split(y, list(op.outputs), dim=-1)

    def _mix_experts(self, op: MixExperts, now: Pass, x: Tensor) -> Sequence[Tensor]:
        """Weighted sums are float32 or wider, as are the weights."""
        scores = F.linear(x, self.program.full(f"{op.name}.router.weight"))
        shares, picked = routed(op.experts, scores)
        mixed = torch.zeros_like(x, dtype=shares.dtype)
        for expert in sorted({*picked.flatten().tolist()}):
            rows, ranks = torch.where(picked == expert)
            up, down = op.linears(expert)
            (h,) = _gate(Gate("", "", op.activation), now, *self._linear(up, now, x[rows]))
            (y,) = self._linear(down, now, h)
            mixed.index_add_(0, rows, y * shares[rows, ranks, None])
        return (mixed.to(x.dtype),)


@dataclass(frozen=True, slots=True)
class Step:
    op: Op
    compute: Callable[..., Sequence[Tensor]]
    reads: Sequence[str]
    writes: Sequence[str]
    dies: Sequence[str]  # values that nothing reads any more
    part: Part


def _run(steps: Sequence[Step], now: Pass, values: dict[str, Tensor], watch: Watch | None) -> None:
    for step in steps:
        results = step.compute(step.op, now, *[values[name] for name in step.reads])
        values.update(zip(step.writes, results, strict=True))
        for name in step.dies:
            del values[name]
        if watch is not None:
            watch.spent(step.part)


def in_heads(x: Tensor, width: int) -> Tensor:
    """[T, count · width] → a view [T, count, width]."""
    return x.view(len(x), x.shape[1] // width, width)


def spec_of(op: Attend, program: Program) -> AttentionSpec:
    bias, storage = of_encoding(op.encoding)
    return AttentionSpec(
        num_heads=op.num_heads,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        scale=op.scale,
        dtype=program.dtype,
        device=program.device,
        window=op.window,
        causal=op.causal,
        bias=bias,
        storage=storage,
        gated=op.encoding is not None and forgets(op.encoding),
        cap=op.cap,
    )


def norm(op: Norm, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Over each `op.width` columns of x [T, width]; in float32 or wider."""
    groups = in_heads(x, op.width).to(weight.dtype)
    if op.centred:
        groups = F.layer_norm(groups, (op.width,), weight, bias, op.eps)
    else:
        groups = F.rms_norm(groups, (op.width,), weight, op.eps)
    return groups.to(x.dtype).flatten(1)


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """y = x · weightᵀ + bias; x [T, inputs] → [T, outputs].

    Only weights are rounded: sums have the input's precision or wider. Of the CPU kernels, those
    for processors that multiply 8-bit integers round x, too.
    """
    match weight:
        case Int8():
            y = F.linear(x, weight.rounded * weight.power.to(x.dtype)[:, None]).float()
            y = y * weight.rest
            return (y if bias is None else y + bias).to(x.dtype)
        case Int4():
            return F.linear(x, weight.widened().to(x.dtype), bias)
        case _:
            return F.linear(x, weight, bias)


def routed(experts: Experts, scores: Tensor) -> tuple[Tensor, Tensor]:
    """A router's scores [T, experts] → weights and numbers of those picked, [T, used]; the weights
    float32 or wider."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares, picked = scores.softmax(dim=-1, dtype=wide).topk(experts.used, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True) if experts.normalized else shares, picked


def attended(op: Attend, attend: AttendPaged, now: Pass, q: Tensor) -> Tensor:
    """[T, heads · head_dim] → the same."""
    batch = now.batch
    if op.crosses:
        assert batch.cross is not None, "an encoder-decoder needs encoded prompts"
        batch = batch.cross.seen
    rotation = None if op.encoding is None else op.encoding.rotation()
    heads = in_heads(q, op.head_dim)
    return attend(heads, now.layer(op.layer), batch, now.bias(op.encoding), rotation).flatten(1)


def embedded(encoding: PositionalEncoding, x: Tensor, positions: Tensor) -> Tensor:
    """x [T, width] with the encoding's part, contiguous. Raises EncodingError for another dtype."""
    y = encoding.embed(x, positions)
    if y.dtype is not x.dtype:
        raise EncodingError(
            f"embed of {type(encoding).__name__} returns {y.dtype} for {x.dtype}; "
            "end it with .to(x.dtype)"
        )
    return y.contiguous()  # as kernels read it, and an encoding may leave it otherwise


def gates_of(encoding: PositionalEncoding, x: Tensor) -> Tensor:
    """What `x` [T, width] makes of the gates, logarithms [T, heads]."""
    gates = encoding.gates(x)
    assert gates is not None, "asked of encodings with gates alone"
    return gates


def query_bias(encoding: PositionalEncoding, x: Tensor, q: Tensor) -> QueryBias:
    """x [T, width] and q [T, heads, head_dim] → each query's own bias, as kernels read it."""
    found = encoding.query_bias(x, q)
    assert found is not None, "asked of encodings with such a bias alone"
    return QueryBias(found.float().transpose(0, 1).contiguous())


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


def _forget(op: Forget, now: Pass, x: Tensor) -> Sequence[Tensor]:
    now.layer(op.layer).write_gates(gates_of(op.encoding, x), now.batch.slots)
    return ()


def _ask_query(op: AskQuery, now: Pass, x: Tensor, q: Tensor) -> Sequence[Tensor]:
    now.of_queries = query_bias(op.encoding, x, in_heads(q, op.head_dim))
    return ()


def scaled_queries(op: ScaleQueries, now: Pass, q: Tensor) -> Tensor:
    """[T, heads · head_dim]."""
    scales = op.encoding.query_scales()
    assert scales is not None, "only layers with scales have this op"
    scaled = in_heads(q, op.head_dim) * scales[now.batch.positions][..., None]
    return scaled.flatten(1).to(q.dtype)


def _scale_queries(op: ScaleQueries, now: Pass, q: Tensor) -> Sequence[Tensor]:
    return (scaled_queries(op, now, q),)


def _rotate(op: Rotate, now: Pass, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    q, k = (in_heads(each, op.head_dim) for each in (q, k))
    return tuple(each.flatten(1) for each in rotated(op.encoding, q, k, now.batch))


def _store(op: Store, now: Pass, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    k, v = (in_heads(each, op.head_dim) for each in (k, v))
    now.layer(op.layer).write(k, v, now.batch.slots)
    return ()


def _gate(op: Gate, now: Pass, gate: Tensor, up: Tensor) -> Sequence[Tensor]:
    return (ACTIVATIONS[op.activation](gate) * up,)


def _activate(op: Activate, now: Pass, x: Tensor) -> Sequence[Tensor]:
    return (ACTIVATIONS[op.activation](x),)


def _scale(op: Scale, now: Pass, x: Tensor) -> Sequence[Tensor]:
    return (x * op.factor,)


def _soft_cap(op: SoftCap, now: Pass, x: Tensor) -> Sequence[Tensor]:
    return (capped(x, op.most),)


def _add(op: Add, now: Pass, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return (x + y,)


def _keep(op: Keep, now: Pass, *values: Tensor) -> Sequence[Tensor]:
    return tuple(each[now.batch.output_rows] for each in values)
