"""A pass as data: what is computed, in order, with which weights. How, is an executor's matter.

A block is a list of ops over named values (model/recipes.py), and C++ walks the same list in one
call, so the fast path follows any order of known parts. Names and shapes of weights follow from the
ops, so loading, saving and quantising need no modules. Encodings are modules: they own parameters,
and users write them. They are frozen after loading; a program is built then, with each layer's
encoding in its ops, and never changes.

Knows no arithmetic, requests or files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from ropewalk.model.config import Activation, Experts, ModelConfig
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.weights.quantize import Weight, round_matrices


class Part(IntEnum):
    """What the time of a pass is spent on."""

    EMBEDDING = 0
    POSITION = 1  # vectors added to embeddings, queries scaled and rotated, keys, gates
    NORM = 2
    LINEAR = 3  # and an activation that is computed with it
    ACTIVATION = 4
    STORE = 5  # keys and values written
    ATTENTION = 6  # with the bias, and the rotation that a key storage leaves to attention
    RESIDUAL = 7
    HEAD = 8


@dataclass(frozen=True, slots=True)
class Op:
    """One step over values [rows, width], read and written by name; names are separated by spaces.

    An op that writes a name it reads replaces that value.
    """

    reads: str
    writes: str


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Each row's token's row of a table."""

    name: str
    vocab: int
    width: int


@dataclass(frozen=True, slots=True)
class Place(Op):
    """What the encoding adds to embeddings."""

    encoding: PositionalEncoding


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """Over each `width` consecutive columns: RMSNorm (arXiv 1910.07467) or, centred, LayerNorm
    (arXiv 1607.06450). One weight for all of them, and perhaps a bias."""

    name: str
    width: int
    eps: float
    centred: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x · weightᵀ + bias. Its outputs are divided among the values written."""

    name: str
    inputs: int
    outputs: tuple[int, ...]
    bias: bool = False
    part: Part = Part.LINEAR


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """Clamp every value to ± `most`."""

    most: float


@dataclass(frozen=True, slots=True)
class Forget(Op):
    """Write the encoding's gates to the slots of the batch, in a layer of the cache, for Attend."""

    layer: int
    encoding: PositionalEncoding


@dataclass(frozen=True, slots=True)
class AskQuery(Op):
    """Find each query's own bias, for the Attend that follows."""

    head_dim: int
    encoding: PositionalEncoding


@dataclass(frozen=True, slots=True)
class ScaleQueries(Op):
    """Multiply each by what the encoding has for its position."""

    head_dim: int
    encoding: PositionalEncoding


@dataclass(frozen=True, slots=True)
class Rotate(Op):
    """Queries and keys, as the encoding does before keys are stored."""

    head_dim: int
    encoding: PositionalEncoding


@dataclass(frozen=True, slots=True)
class Store(Op):
    """Write keys and values to the slots of the batch, in a layer of the cache."""

    head_dim: int
    layer: int


@dataclass(frozen=True, slots=True)
class Attend(Op):
    """Queries over the keys of a layer of the cache: their own, or those of encoded prompts."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    layer: int
    encoding: PositionalEncoding | None = None  # whose bias and remaining rotation apply
    window: int | None = None
    causal: bool = True
    crosses: bool = False  # to the encoded prompt
    cap: float | None = None  # of scores without bias, as AttentionSpec has it


@dataclass(frozen=True, slots=True)
class Gate(Op):
    """gate, up → activation(gate) · up (arXiv 2002.05202)."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class MixExperts(Op):
    """The gated MLPs that a router picks for each row, weighted by its softmax (arXiv 2401.04088).

    Weights: name.router, and for each expert name.I.gate_up and name.I.down, without biases.
    """

    name: str
    experts: Experts
    inputs: int
    width: int  # inside one expert
    activation: Activation

    def linears(self, expert: int) -> tuple[Linear, Linear]:
        """An expert's layers, between whose values gate and up a Gate makes h."""
        at, width = f"{self.name}.{expert}.", (self.width, self.width)
        up = Linear(self.reads, "gate up", f"{at}gate_up", self.inputs, width)
        return up, Linear("h", self.writes, f"{at}down", self.width, (self.inputs,))


@dataclass(frozen=True, slots=True)
class Activate(Op):
    activation: Activation


@dataclass(frozen=True, slots=True)
class Scale(Op):
    factor: float
    part: Part = Part.EMBEDDING


@dataclass(frozen=True, slots=True)
class SoftCap(Op):
    """most · tanh(x / most) (arXiv 2408.00118, section 2)."""

    most: float


@dataclass(frozen=True, slots=True)
class Add(Op):
    """The sum of two values."""


@dataclass(frozen=True, slots=True)
class Keep(Op):
    """Leave only the rows whose logits are wanted."""


PARTS: Mapping[type[Op], Part] = {
    Embed: Part.EMBEDDING,
    Place: Part.POSITION,
    Norm: Part.NORM,
    Clip: Part.LINEAR,
    Forget: Part.POSITION,
    AskQuery: Part.POSITION,
    ScaleQueries: Part.POSITION,
    Rotate: Part.POSITION,
    Store: Part.STORE,
    Attend: Part.ATTENTION,
    Gate: Part.ACTIVATION,
    MixExperts: Part.LINEAR,
    Activate: Part.ACTIVATION,
    SoftCap: Part.HEAD,
    Add: Part.RESIDUAL,
    Keep: Part.RESIDUAL,
}
# Which look at the batch.
_OF_ALL_ROWS = (Embed, Place, Forget, AskQuery, ScaleQueries, Rotate, Store, Attend)


def part_of(op: Op) -> Part:
    own: Part | None = getattr(op, "part", None)  # of a kind that is found in several parts
    return PARTS[type(op)] if own is None else own


def live_after(ops: Sequence[Op], results: Iterable[str] = ()) -> list[frozenset[str]]:
    """For each op, the values that later ones read, or that are results."""
    found: list[frozenset[str]] = []
    live = frozenset(results)
    for op in reversed(ops):
        found.append(live)
        live = live - set(op.writes.split()) | set(op.reads.split())
    return found[::-1]


def checked(ops: Iterable[Op]) -> tuple[Op, ...]:
    """All of them. Raises ValueError with one that reads a value which none before it writes."""
    ops, written = tuple(ops), set[str]()
    for op in ops:
        for name in op.reads.split():
            if name not in written:
                raise ValueError(
                    f"{type(op).__name__}({op.reads!r}, {op.writes!r}) reads {name!r}, which no op "
                    "before it writes; give it a name that one does"
                )
        written.update(op.writes.split())
    return ops


def keeping(ops: Sequence[Op]) -> tuple[Op, ...]:
    """With a Keep, once no op looks at the batch any more: other rows need nothing further."""
    last = max(index for index, op in enumerate(ops) if isinstance(op, _OF_ALL_ROWS))
    live = " ".join(sorted(live_after(ops)[last]))
    return (*ops[: last + 1], Keep(live, live), *ops[last + 1 :])


@dataclass(frozen=True, slots=True)
class Program:
    """A decoder, complete: built once its weights are loaded and its encodings frozen."""

    config: ModelConfig
    ops: tuple[Op, ...]  # tokens → the value "logits"
    prompt_ops: tuple[Op, ...]  # of an encoder-decoder: run before, over prompts not encoded yet
    weights: Mapping[str, Weight]  # by the parameter's name
    encoding: PositionalEncoding
    encoder_encoding: PositionalEncoding | None = None

    @property
    def head(self) -> Linear:
        """What makes logits, but for a factor or cap; it reads what a batch calls hidden states."""
        return next(op for op in self.ops if isinstance(op, Linear) and op.part is Part.HEAD)

    @property
    def dtype(self) -> torch.dtype:
        return self.full("embed.weight").dtype

    @property
    def device(self) -> torch.device:
        return self.full("embed.weight").device

    def full(self, name: str) -> Tensor:
        """A weight that is not rounded."""
        weight = self.weights[name]
        assert isinstance(weight, Tensor)
        return weight

    def bias(self, op: Linear | Norm) -> Tensor | None:
        return self.full(f"{op.name}.bias") if op.bias else None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the ops and of the encodings, each once: a tied head is the embedding's."""
        yield from encoding_parameters(self.encoding, self.encoder_encoding)
        seen: set[int] = set()
        for name, weight in self.weights.items():
            if isinstance(weight, Tensor) and id(weight) not in seen:
                seen.add(id(weight))
                yield name, weight


def encoding_parameters(
    encoding: PositionalEncoding, encoder_encoding: PositionalEncoding | None = None
) -> Iterator[tuple[str, Tensor]]:
    """By their names in a checkpoint."""
    for prefix, each in (("", encoding), ("encoder.", encoder_encoding)):
        if each is not None:
            for name, parameter in each.named_parameters():
                yield f"{prefix}encoding.{name}", parameter


def shapes_of(ops: Sequence[Op]) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for op in ops:
        match op:
            case Embed():
                found[f"{op.name}.weight"] = (op.vocab, op.width)
            case Linear():
                found[f"{op.name}.weight"] = (sum(op.outputs), op.inputs)
                if op.bias:
                    found[f"{op.name}.bias"] = (sum(op.outputs),)
            case MixExperts():
                found[f"{op.name}.router.weight"] = (op.experts.count, op.inputs)
                found |= shapes_of(linears_of([op]))
            case Norm():
                found[f"{op.name}.weight"] = (op.width,)
                if op.bias:
                    found[f"{op.name}.bias"] = (op.width,)
    return found


def linears_of(ops: Iterable[Op]) -> list[Linear]:
    """All linear layers, those of experts too: whose weights may be rounded. Routers are not."""
    found: list[Linear] = []
    for op in ops:
        if isinstance(op, Linear):
            found.append(op)
        elif isinstance(op, MixExperts):
            found += chain.from_iterable(map(op.linears, range(op.experts.count)))
    return found


def of_norms(ops: Sequence[Op]) -> set[str]:
    """Names of the norms' weights. These are float32 or wider: they are few, and of Gemma's, which
    are 1 and a stored difference, bfloat16 would keep little of that."""
    norms = [op for op in ops if isinstance(op, Norm)]
    return {f"{op.name}.{part}" for op in norms for part in ("weight", "bias")}


def quantized(program: Program, bits: Literal[8, 4] = 8) -> Program:
    """With rounded matrices, except those of encodings; a tied embedding stays as it is."""
    names = {f"{op.name}.weight" for op in linears_of((*program.prompt_ops, *program.ops))}
    return replace(program, weights=round_matrices(program.weights, names, bits))
