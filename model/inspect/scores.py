"""One query's attention scores in one layer of a served model, split into content and position.

Computed by the definition, op by op in torch on the CPU, from the checkpoint's weights as they are
served: rounded to the same dtype or bits. Each weight is read when its op needs it, so that a large
model takes little memory. Only numbers, no pictures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.types import KeyStorage
from ropewalk.model import recipes
from ropewalk.model.attention.base import content_bias, forgotten
from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.batch import in_order, of_one
from ropewalk.model.config import EncoderDecoderConfig, ModelConfig
from ropewalk.model.encodings.base import (
    LinearBias,
    Scored,
    TableBias,
    asks_keys,
    asks_query,
    create,
    embeds,
    forgets,
    inherits,
    rotates,
    stored_gates,
)
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.inspect.explain.rotating import find_pair_rotation
from ropewalk.model.layers.executor import (
    Pass,
    TorchExecutor,
    in_heads,
    linear,
    rotated,
    scaled_queries,
    spec_of,
)
from ropewalk.model.loading.checkpoints import InUse, load_encoding, read_parameter
from ropewalk.model.program import (
    Attend,
    Clip,
    Linear,
    Norm,
    Op,
    Place,
    Program,
    Rotate,
    Scale,
    ScaleQueries,
    linears_of,
    of_norms,
)
from ropewalk.model.weights.quantize import Weight, round_matrices

CPU = torch.device("cpu")
FARTHEST = 512  # distances that the curve of a bias has
Kind = Literal[
    "rotation",
    "query_scale",
    "bias",
    "query_bias",
    "content_bias",
    "gates",
    "embedding",
    "several",
    "none",
]

WITHIN = (
    "the position is part of every token's vector before layer 0, and what the layers made of it "
    "since cannot be told apart from the content; in layer 0 it can"
)
CLAMPED = "queries, keys or scores are clamped in this model: a sum that is clamped has no parts"
SEVERAL = "the encoding acts in several places at once, whose effects are not independent"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two coordinates that rotate together, `frequency` radians per position.

    For each head it adds magnitude · cos(distance · frequency + phase) to the score of the chosen
    key; [heads] each.
    """

    coordinates: tuple[int, int]
    frequency: float
    magnitudes: Tensor | None = None
    phases: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Tensors are float32, [heads, keys]. content + position = scores, up to rounding.

    content: the score without the bias, of query and key rotated as if at one position; in layer 0
    of a model that adds positions to embeddings, what the embeddings alone make of it, and `terms`
    is what the position is the sum of. They are None where nothing can be split, and `why_not`
    says why.
    """

    encoding: str
    kind: Kind
    key_storage: KeyStorage | None  # of a rotation: how much of it stored keys have
    window: int | None
    causal: bool
    num_kv_heads: int
    scale: float
    scores: Tensor
    weights: Tensor
    content: Tensor | None
    position: Tensor | None
    terms: Mapping[str, Tensor] | None
    why_not: str | None
    pairs: tuple[Pair, ...]
    still: Tensor | None  # [heads]: what coordinates that do not rotate add for the chosen key
    distances: Tensor | None  # [distances]
    curve: Tensor | None  # [heads, distances]: the bias


class Weights(Mapping[str, Weight]):
    """A checkpoint's, as they are served; read when they are asked for, and not kept."""

    def __init__(self, served: InUse, ops: Sequence[Op]) -> None:
        self._served = served
        self._matrices = {f"{op.name}.weight" for op in linears_of(ops)}
        self._norms = of_norms(ops)
        self._embedding: Tensor | None = None  # which says what the dtype is

    def __getitem__(self, name: str) -> Weight:
        if name == "embed.weight" and self._embedding is not None:
            return self._embedding
        dtype = torch.float32 if name in self._norms else self._served.dtype
        weight = read_parameter(self._served.checkpoint, name, dtype)
        if name == "embed.weight":
            self._embedding = weight
        if self._served.bits is None or name not in self._matrices:
            return weight
        return round_matrices({name: weight}, {name}, self._served.bits)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._served.checkpoint.parameters)

    def __len__(self) -> int:
        return len(self._served.checkpoint.parameters)


def program_of(served: InUse) -> Program:
    """The program that is served, its weights still in their files. Raises CheckpointError."""
    checkpoint, config = served.checkpoint, served.checkpoint.config
    encoding = create(config.encoding, config, served.context, CPU)
    load_encoding(checkpoint, encoding)
    of_encoder = None
    if isinstance(config, EncoderDecoderConfig):
        encoder = config.encoder
        of_encoder = create(encoder.encoding, encoder, served.context, CPU)
        load_encoding(checkpoint, of_encoder, side="encoder.")
    bare = recipes.program(config, {}, encoding, of_encoder)
    weights = Weights(served, (*bare.prompt_ops, *bare.ops))
    return recipes.program(config, weights, encoding, of_encoder)


def layers_of(config: ModelConfig) -> int:
    """Those whose scores can be explained: of an encoder-decoder, the encoder's."""
    seen = config.encoder if isinstance(config, EncoderDecoderConfig) else config
    return seen.num_layers


@torch.inference_mode()
def explain(
    served: InUse, tokens: Sequence[int], layer: int, query: int, key: int | None
) -> Explanation:
    """Scores of token number `query` over all others in `layer`; pairs for the one number `key`."""
    program = program_of(served)
    ops = program.prompt_ops or program.ops
    seen = Looked(program, ops, layer, tokens, served)
    return seen.explanation(query, key)


class Looked:
    """A pass over `tokens` up to a layer's attention, and what that finds."""

    def __init__(
        self, program: Program, ops: Sequence[Op], layer: int, tokens: Sequence[int], served: InUse
    ) -> None:
        attends = [i for i, op in enumerate(ops) if isinstance(op, Attend) and not op.crosses]
        at = attends[layer]
        turns = max(i for i, op in enumerate(ops[:at]) if isinstance(op, Rotate))
        attend = ops[at]
        assert isinstance(attend, Attend) and attend.encoding is not None
        self.op, self.encoding = attend, attend.encoding
        self._gates = stored_gates(program.encoding, program.config)
        self.whole = program.encoder_encoding or program.encoding
        self.config = program.config
        self.reference = ReferenceAttention(spec_of(attend, program))
        size = served.block_size
        table = in_order(-(-len(tokens) // size), size)
        self.batch = of_one(tokens, 0, table, size, wanted=1, device=CPU)
        self._blocks, self._served = len(table.blocks), served
        executor = TorchExecutor(program, ReferenceAttention)
        now = Pass(self.batch, self._cache())
        self.why_not: str | None = None
        self.placed: tuple[Tensor, Tensor] | None = None
        if embeds(self.whole):
            self.why_not = WITHIN if layer else SEVERAL if self.kind == "several" else None
        if embeds(self.whole) and self.why_not is None:
            self.placed = None if attend.cap else _placed(program, ops[:turns], executor, now)
            self.why_not = CLAMPED if self.placed is None else None
        before = executor.run(ops, range(turns), now, {})
        # Before anything turned them.
        self.q, self.k = (in_heads(before[name], attend.head_dim) for name in ("q", "k"))
        self.v = in_heads(before["v"], attend.head_dim)
        after = executor.run(ops, range(turns, at), now, before)
        self.queries = in_heads(after["q"], attend.head_dim)
        self.of_queries = now.of_queries if asks_query(self.encoding) else None
        self.kv = now.layer(attend.layer)

    def explanation(self, query: int, key: int | None) -> Explanation:
        encoding, op, batch = self.encoding, self.op, self.batch
        row, count = slice(query, query + 1), len(batch.tokens)
        keys, _, positions = self.reference.gather(self.kv, batch, 0, count)
        rotation = encoding.rotation()
        plain = self.reference.scores(
            self.queries[row], keys, batch.positions[row], positions, batch.offsets, rotation
        )[:, 0]
        content, position = plain, torch.zeros_like(plain)
        terms: Mapping[str, Tensor] | None = None
        turned = rotates(encoding) or rotation is not None
        q, k = self.at_same_position() if turned else (self.queries, keys)
        if turned:
            zero = torch.zeros_like(batch.positions)
            content = self.reference.scores(q[row], k, zero[row], zero, zero, rotation)[:, 0]
            position = plain - content
        scores = plain
        hidden = self.reference.hidden(count, count, CPU)[query]
        added = self._added(query, plain.masked_fill(hidden, -torch.inf), keys, positions)
        if added is not None:
            scores = plain + added
            position = position + added if turned else added
        if self.placed is not None:
            terms = self._terms(row, keys)
            position = torch.stack([*terms.values()]).sum(dim=0)
            content = plain - position
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        split = self.why_not is None
        distances, curve = self._curve(query, added)
        pairs, still = self._pairs(q[query], None if key is None else k[key], rotation is not None)
        return Explanation(
            encoding=self.config.encoding.name,
            kind=self.kind,
            key_storage=(rotation.storage if rotation else KeyStorage.ABSOLUTE if turned else None),
            window=op.window,
            causal=op.causal,
            num_kv_heads=op.num_kv_heads,
            scale=op.scale,
            scores=scores.float(),
            weights=weights.float(),
            content=content.float() if split else None,
            position=position.float() if split else None,
            terms=terms and {name: term.float() for name, term in terms.items()},
            why_not=self.why_not,
            pairs=pairs,
            still=still,
            distances=distances,
            curve=curve,
        )

    @property
    def kind(self) -> Kind:
        """What the encoding does in this layer, or before the first."""
        encoding = self.encoding
        found: list[Kind] = []
        if rotates(encoding) or encoding.rotation() is not None:
            found.append("rotation")
        scales = encoding.query_scales()
        if scales is not None and (scales[self.batch.positions] != 1).any():
            found.append("query_scale")
        if encoding.score_bias() is not None:
            found.append("bias")
        if asks_query(encoding):
            found.append("query_bias")
        if asks_keys(encoding):
            found.append("content_bias")
        if forgets(encoding):
            found.append("gates")
        if embeds(self.whole):
            found.append("embedding")
        return "several" if len(found) > 1 else found[0] if found else "none"

    def at_same_position(self) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, head_dim] and gathered keys as if all tokens were at position 0."""
        zero = torch.zeros_like(self.batch.positions)
        start = replace(self.batch, positions=zero, offsets=zero)
        q, k = rotated(self.encoding, self.q, self.k, start)
        kv = self._cache().layer(self.op.layer)  # which may round them
        kv.write(k, self.v, self.batch.slots)
        return q, self.reference.gather(kv, self.batch, 0, len(self.batch.tokens))[0]

    def _terms(self, row: slice, keys: Tensor) -> dict[str, Tensor]:
        """What positions in queries and keys add to the scores [heads, keys], by whose they are."""
        assert self.placed is not None
        wide, repeat = self.reference.dtype, self.op.num_heads // self.op.num_kv_heads
        of_q, of_k = (in_heads(each, self.op.head_dim).to(wide) for each in self.placed)
        of_q, of_k = of_q[row], of_k.repeat_interleave(repeat, dim=1)
        q, k = self.queries[row].to(wide) - of_q, keys - of_k

        def scores(q: Tensor, k: Tensor) -> Tensor:
            return torch.einsum("qhd,khd->hqk", q, k)[:, 0] * self.op.scale

        return {"query": scores(of_q, k), "key": scores(q, of_k), "both": scores(of_q, of_k)}

    def _cache(self) -> KVCache:
        served = self._served
        return KVCache(
            self.config,
            blocks=self._blocks,
            block_size=served.block_size,
            dtype=served.kv_dtype,
            device=CPU,
            gates=self._gates,
        )

    def _added(self, query: int, plain: Tensor, keys: Tensor, positions: Tensor) -> Tensor | None:
        """Bias and gates: added to `plain` scores [heads, keys] of keys at these positions."""
        bias, added = self.encoding.score_bias(), None
        if asks_keys(self.encoding):
            q, own = self.queries[query].to(keys.dtype), self.batch.positions[query]
            of_keys = keys.transpose(0, 1)[:: self.op.num_heads // self.op.num_kv_heads]
            seen = Scored(plain[:, None], q[:, None], of_keys, own[None], positions)
            added = content_bias(self.encoding, seen)[:, 0].masked_fill(plain == -torch.inf, 0)
        elif self.of_queries is not None:
            distance = self.batch.positions[query] - positions
            added = self.of_queries.at(torch.tensor([query]), distance[None])[:, 0]
        elif bias is not None:
            added = bias.between(self.batch.positions[query : query + 1], positions)[:, 0]
        if forgets(self.encoding):
            sums = forgotten(self.kv, self.batch)[0]
            between = (sums - sums[:, query, None]).to(self.reference.dtype)
            added = between if added is None else added + between
        return added

    def _curve(self, query: int, added: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """What is added by distance; if that depends on more, for the query's own keys."""
        if added is None:
            return None, None
        bias = self.encoding.score_bias()
        if isinstance(bias, LinearBias | TableBias) and not forgets(self.encoding):
            far = min(self._served.context, FARTHEST)
            distances = torch.arange(0 if self.op.causal else 1 - far, far)
            return distances, bias.at(distances).float()
        keys = torch.arange(query + 1 if self.op.causal else len(self.batch.tokens))
        return query - keys, added[:, keys].float()

    def _pairs(
        self, q: Tensor, k: Tensor | None, left: bool
    ) -> tuple[tuple[Pair, ...], Tensor | None]:
        """q, k [heads, head_dim]: of query and key, as if at one position. left: to attention."""
        turning = self._turning()
        if not turning:
            return (), None
        if k is None:
            return tuple(Pair(each, speed) for each, speed in turning), None
        q, k = q.to(self.reference.dtype), k.to(self.reference.dtype)
        if left and isinstance(self.encoding, RoPE):
            q = _magnified(q, self.encoding)
            k = _magnified(k, self.encoding) if self.encoding.key_storage == "raw" else k
        first, second = torch.tensor([each for each, _ in turning]).t()
        straight = q[:, first] * k[:, first] + q[:, second] * k[:, second]
        crossed = q[:, second] * k[:, first] - q[:, first] * k[:, second]
        sizes = torch.hypot(straight, crossed) * self.op.scale
        phases = torch.atan2(crossed, straight)
        rest = [i for i in range(q.shape[1]) if i not in {*first.tolist(), *second.tolist()}]
        still = (q[:, rest] * k[:, rest]).sum(dim=1) * self.op.scale
        return tuple(
            Pair(each, speed, size.float(), phase.float())
            for (each, speed), size, phase in zip(turning, sizes.t(), phases.t(), strict=True)
        ), still.float()

    def _turning(self) -> list[tuple[tuple[int, int], float]]:
        """Pairs of coordinates and radians per position, fastest first."""
        if self.op.cap is not None:  # what pairs add up to is capped
            return []
        encoding, some = self.encoding, min(self._served.context, 1 << 12)
        left = encoding.rotation()
        if left is not None and left.far is not None:  # a pair has no one speed
            return []
        if isinstance(encoding, RoPE) and _has_its_speeds(encoding, some):
            half = encoding.width // 2
            pairs = [
                (i, i + half) if encoding.layout == "half" else (2 * i, 2 * i + 1)
                for i in range(half)
            ]
            return list(zip(pairs, encoding.frequencies.tolist(), strict=True))
        if not rotates(encoding) or left is not None:
            return []
        found = find_pair_rotation(encoding, self.config, some)
        if found is None:
            return []
        return list(zip(found.pairs, found.speeds.tolist(), strict=True))


def _placed(
    program: Program, ops: Sequence[Op], executor: TorchExecutor, now: Pass
) -> tuple[Tensor, Tensor] | None:
    """What of queries and keys the position makes, [T, heads · head_dim] each.

    Norms divide by what they do divide by, so that all up to the scores is a sum. None where
    something is clamped.
    """
    values: dict[str, Tensor] = {}
    placed: dict[str, Tensor] = {}  # of the values, by name
    every = program.prompt_ops or program.ops
    for index, op in enumerate(ops):
        before = values
        values = executor.run(every, range(index, index + 1), now, before)
        reads, writes = op.reads.split(), op.writes.split()
        if isinstance(op, Place):
            placed["x"] = values["x"].float() - before["x"].float()
        elif isinstance(op, Clip):
            if any((before[name].abs() > op.most).any() for name in reads):
                return None
        elif (part := placed.get(op.reads)) is not None:  # of these ops, all read one value
            match op:
                case Norm():
                    made = [_normed(op, program, before[op.reads].float(), part)]
                case Linear():
                    weight = program.weights[f"{op.name}.weight"]
                    wide = weight.float() if isinstance(weight, Tensor) else weight
                    made = list(torch.split(linear(part, wide, None), list(op.outputs), dim=-1))
                case Scale():
                    made = [part * op.factor]
                case ScaleQueries():
                    made = [scaled_queries(op, now, part)]
                case _:
                    raise TypeError(f"before the first scores is a {type(op).__name__}")
            placed |= dict(zip(writes, made, strict=True))
    return placed["q"], placed["k"]


def _normed(op: Norm, program: Program, whole: Tensor, part: Tensor) -> Tensor:
    """Part of the norm of `whole`, without the bias."""
    whole, part = in_heads(whole, op.width), in_heads(part, op.width)
    if op.centred:
        whole, part = (each - each.mean(dim=-1, keepdim=True) for each in (whole, part))
    size = (whole.square().mean(dim=-1, keepdim=True) + op.eps).sqrt()
    return (part / size * program.full(f"{op.name}.weight").float()).flatten(1)


def _has_its_speeds(rope: RoPE, context: int) -> bool:
    """Whether it turns by its frequencies; a class of one's own may do it in another way."""
    if not inherits("rotate", rope, RoPE):
        return False
    given = [table[:context].float() for table in (rope.cos, rope.sin)]
    told = [rope.magnitude * table for table in RoPE.tables(rope, context)]
    return all(
        # Tables of float64 have more exact angles.
        own.shape == its.shape and torch.allclose(own, its, atol=1e-3)
        for own, its in zip(given, told, strict=True)
    )


def _magnified(x: Tensor, rope: RoPE) -> Tensor:
    """The factor of a scaling on the rotated coordinates, which attention still has to apply."""
    factor = torch.ones(x.shape[-1], dtype=x.dtype)
    factor[: rope.width] = rope.magnitude
    return x * factor
