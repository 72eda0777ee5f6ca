"""What a positional encoding may touch: the embeddings, the queries and keys, or the scores.

An encoding is one file in this folder. It knows positions and distances, never requests,
batches or the cache, and always takes positions from its arguments. One that counts by content,
not by position, has gates for each token, which are stored beside its key.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.cache.types import Capability, KeyStorage, Op
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork
from ropewalk.model.encodings.common.rotary import Rotation
from ropewalk.model.formatting import in_one_line, where
from ropewalk.model.memory import is_out_of_memory

MAX_TABLE = 1 << 26  # numbers: a million positions in heads of 128
MAX_POSITIONS = 1 << 22
CHUNK = 1 << 14


class EncodingError(ValueError):
    """An encoding that does not exist, or options it cannot use."""


@dataclass(frozen=True, slots=True)
class LinearBias:
    """Adds -slope · distance to the score; one slope per query head."""

    slopes: Tensor  # [heads] float32

    def at(self, distance: Tensor) -> Tensor:
        """distance (query position - key position), any shape → bias [heads, *shape]."""
        slopes = self.slopes.view(-1, *[1] * distance.dim())
        return -slopes * distance.to(slopes.dtype)

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., Q] and [..., K] → bias [heads, ..., Q, K]."""
        return self.at(queries[..., :, None] - keys[..., None, :])


@dataclass(frozen=True, slots=True)
class TableBias:
    """Adds table[head, zero + distance] to the score; distances outside use the end columns."""

    table: Tensor  # [heads, span] float32
    zero: int = 0  # column of distance 0

    def at(self, distance: Tensor) -> Tensor:
        """distance (query position - key position), any shape → bias [heads, *shape]."""
        return self.table[:, (distance + self.zero).clamp(0, self.table.shape[1] - 1).long()]

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., Q] and [..., K] → bias [heads, ..., Q, K]."""
        return self.at(queries[..., :, None] - keys[..., None, :])


@dataclass(frozen=True, slots=True)
class MaterialisedBias(TableBias):
    """The same bias, but materialised for all rows and keys of a step before any layer reads it.

    What implementations without a fused kernel do; here as a baseline for comparison.
    """


@dataclass(frozen=True, slots=True)
class QueryBias:
    """Adds table[head, row, distance] to the score: a table for each query of one step."""

    table: Tensor  # [heads, T, span] float32

    def at(self, rows: Tensor, distance: Tensor) -> Tensor:
        """Rows [..., Q] of the step, distances [..., Q, K] → bias [heads, ..., Q, K]."""
        column = distance.clamp(0, self.table.shape[2] - 1).long()
        return self.table[:, rows].gather(-1, column.expand(len(self.table), *column.shape))


@dataclass(frozen=True, slots=True)
class KeyBias:
    """Adds table[head, key position] to the score: a bias whose rounding depends on the key."""

    table: Tensor  # [heads, context] float32

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., Q] and [..., K] → bias [heads, ..., Q, K]."""
        # A block's last slots may lie past the context: unused, but gathered with the rest.
        bias = self.table[:, keys.clamp(max=self.table.shape[1] - 1)][..., None, :]
        return bias.expand(*bias.shape[:-2], queries.shape[-1], -1)


@dataclass(frozen=True, slots=True)
class PairBias:
    """Adds of(query positions, key positions) to the score: any function of both.

    Computed for all rows and keys of a step before its layer reads it, so it is the most
    expensive kind. `of` is also called for keys after the query and for empty slots: what it
    returns there is ignored, but must not be NaN.
    """

    of: Callable[[Tensor, Tensor], Tensor]  # [..., Q] and [..., K] → [heads, ..., Q, K] float32

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [..., Q] and [..., K] → bias [heads, ..., Q, K]."""
        return self.of(queries, keys)


@dataclass(frozen=True, slots=True)
class Scored:
    """The queries and keys of a layer's requests, and what they make of each other.

    Requests are padded to the longest. What a query does not see, such as a later key or padding,
    has a score of -inf, and nothing else tells it: padding has positions too.
    """

    scores: Tensor  # [..., heads, Q, K], at least float32: (q · k) · scale, under a cap capped
    q: Tensor  # [..., heads, Q, head_dim]
    keys: Tensor  # [..., kv_heads, K, head_dim], as they are stored
    positions: Tensor  # [..., Q]
    key_positions: Tensor  # [..., K]

    def keys_by_head(self) -> Tensor:
        """The keys that each query head meets, [..., heads, K, head_dim]."""
        return self.keys.repeat_interleave(self.q.shape[-3] // self.keys.shape[-3], dim=-3)


@dataclass(frozen=True, slots=True)
class ContentBias:
    """Adds of(queries and keys) to the score: any function of them and of their positions."""

    of: Callable[[Scored], Tensor]  # → [..., heads, Q, K]


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Without autocast, which computes in bfloat16."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@dataclass(frozen=True, slots=True)
class ForgetGates:
    """Each head's gate: which share of what came before it a token lets later tokens see.

    sigmoid(weight · x + bias), of what the layer's attention reads (arXiv 2503.02130, section 3).
    """

    weight: Tensor  # [heads, width]
    bias: Tensor  # [heads]

    def of(self, x: Tensor) -> Tensor:
        """x [T, width] → logarithms of the gates [T, heads], at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with exactly(x.device):
            return F.logsigmoid(F.linear(x.to(wide), self.weight.to(wide), self.bias.to(wide)))


@dataclass(frozen=True, slots=True)
class PositionVectors:
    """Adds table[position] · scale to the embedding: an absolute encoding."""

    table: Tensor  # [positions, width] float32
    scale: float = 1.0


BIASES = (LinearBias, TableBias, MaterialisedBias, KeyBias, PairBias)
ScoreBias = LinearBias | TableBias | KeyBias | PairBias


class PositionalEncoding(nn.Module):
    """Where tokens are. Override the hooks that the encoding needs; the defaults do nothing.

    The class attributes are documentation: `ropewalk encodings` prints them.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {}  # name: meaning, and default if there is one
    LIMIT: ClassVar[str] = "none"  # positions past which nothing is served
    BEYOND_TRAINED: ClassVar[str] = "not stated"  # what happens past the trained length
    # Why stored entries cannot be given another position; empty when they can.
    WHY_FIXED: ClassVar[str] = ""

    key_storage: KeyStorage = KeyStorage.RAW
    max_positions: int | None = None  # hard limit on the served context

    @classmethod
    def create(
        cls, options: Mapping[str, Any], config: ModelConfig, context: int, device: torch.device
    ) -> Self:
        """Called once at load, for positions 0 .. context - 1. Raises EncodingError.

        Parameters are allocated uninitialised, like the decoder's.
        """
        if options:
            raise EncodingError(f"{cls.__name__} takes no options, but got {sorted(options)}.")
        return cls()

    @classmethod
    def usual_options(cls, config: ModelConfig) -> dict[str, Any]:
        """Options of published models of this shape, for listings and pictures without a model."""
        return {}

    def first_values(self, generator: torch.Generator) -> None:
        """Initialise the parameters for training; by default, small random values around 0."""
        for parameter in self.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))

    def freeze(self) -> None:
        """Called once after the parameters are loaded, to compute what depends on them."""

    def fixed_tensors(self) -> dict[str, Tensor]:
        """Tensors besides parameters that hooks read and nothing changes after `freeze`.

        The server checks from time to time that their bytes, and those of parameters, are the same.
        """
        return {}

    def vectors(self) -> PositionVectors | None:
        """What `embed` adds to token embeddings, if it is a vector for each position.

        Prefer this to overriding `embed`, which kernels cannot look into.
        """
        return None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: token embeddings [T, width]."""
        vectors = self.vectors()
        if vectors is None:
            return x
        return torch.add(x, vectors.table[positions], alpha=vectors.scale).to(x.dtype)

    def query_scales(self) -> Tensor | None:
        """[positions, 1 or heads] float32: what a query there is multiplied by, before `rotate`."""
        return None

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [T, heads, head_dim], k [T, kv_heads, head_dim], before k is stored.

        positions in the sequence and offsets within a block, [T] each.
        """
        return q, k

    def rotation(self) -> Rotation | None:
        """The rotation left to attention, where `rotate` did not apply all of it."""
        return None

    def score_bias(self) -> ScoreBias | None:
        """The bias that attention adds to the scaled scores."""
        return None

    def forget_gates(self) -> ForgetGates | None:
        """What `gates` computes, if it is a linear layer and a sigmoid.

        Prefer this to overriding `gates`, which kernels cannot look into.
        """
        return None

    def gates(self, x: Tensor) -> Tensor | None:
        """x: what attention's linear layers read [T, width] → logarithms [T, heads] or None.

        They are stored beside the tokens' keys. Attention adds to each score the sum of those of
        all tokens after the key, up to and with the query's own.
        """
        gates = self.forget_gates()
        return None if gates is None else gates.of(x)

    def query_bias(self, x: Tensor, q: Tensor) -> Tensor | None:
        """A bias of each query's own: [T, heads, span], of keys 0, 1, … positions before it.

        Keys farther away get the last one's. x: as for `gates`; q [T, heads, head_dim], before
        `rotate`. In place of `score_bias`, where it depends on what the query is.
        """
        return None

    def content_bias(self, seen: Scored) -> Tensor | None:
        """A bias of queries and keys together: [..., heads, Q, K], like their scores.

        In place of `score_bias`, where it depends on both. No kernel computes it, so it costs
        most. What it is given may not be changed in place; what it returns for keys that a query
        does not see is ignored.
        """
        return None

    def for_layer(self, layer: int) -> "PositionalEncoding":
        """The encoding as layer `layer` sees it."""
        return self

    def capability(self, op: Op, dtype: torch.dtype) -> Capability:
        """What `op` on entries stored in `dtype` requires under this encoding."""
        moves = op in (Op.EVICT_RENUMBER, Op.MOVE_SPAN)
        return Capability.IMPOSSIBLE if moves and self.WHY_FIXED else Capability.FREE

    def shift(self, keys: Tensor, delta: int) -> Tensor:
        """Stored keys [..., kv_heads, head_dim], moved `delta` positions later.

        Called only where `capability` of a move is REWRITE or APPROXIMATE.
        """
        return keys

    def work(self, config: ModelConfig, context: int, block_size: int) -> PositionalWork:
        """For one new token that attends to `context` keys, its own included, in such blocks.

        Listings also ask for contexts longer than the encoding was built for. By default what the
        hooks say: a vector that is added, heads that are rotated, a value for each score.
        """
        total = NO_WORK
        if embeds(self):
            total += PositionalWork(flops=config.hidden_size, bytes=4 * config.hidden_size)
        layers: dict[PositionalEncoding, list[int]] = {}
        for layer, keys in enumerate(config.seen(context)):
            layers.setdefault(self.for_layer(layer), []).append(keys)
        for own, seen in layers.items():
            if rotates(own) or own.rotation() is not None:
                heads = len(seen) * (config.num_heads + config.num_kv_heads)
                total += PositionalWork(rotations=heads, flops=heads * 3 * config.head_dim)
            total += work_of_scales(own.query_scales(), config, len(seen))
            if forgets(own):
                # A product for each gate, and sums of the stored ones.
                made, sums = len(seen) * config.num_heads, config.num_heads * sum(seen)
                read = 4 * (made * (config.hidden_size + 1) + sums)
                total += PositionalWork(
                    bias_values=sums, flops=2 * made * config.hidden_size + 2 * sums, bytes=read
                )
            bias = own.score_bias()
            if bias is not None or asks_query(own) or asks_keys(own):
                values = config.num_heads * sum(seen)
                dense = isinstance(bias, MaterialisedBias | PairBias) or asks_keys(own)
                linear = isinstance(bias, LinearBias)
                read = 4 * (values if dense else config.num_heads * (1 if linear else max(seen)))
                total += PositionalWork(
                    bias_values=values,
                    bias_built=values if dense else 0,
                    flops=2 * values if linear else values,
                    bytes=read,
                    bias_bytes=read,
                )
        return total


def work_of_scales(scales: Tensor | None, config: ModelConfig, layers: int) -> PositionalWork:
    """Of one token's queries in so many layers."""
    if scales is None:
        return NO_WORK
    numbers = layers * config.num_heads * config.head_dim
    return PositionalWork(flops=numbers, bytes=4 * scales.shape[1])


def names() -> list[str]:
    """Encodings in this folder, by file name."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if module.name != "base" and not module.ispkg
    )


def create(
    spec: EncodingSpec, config: ModelConfig, context: int, device: torch.device
) -> PositionalEncoding:
    """The encoding that a spec names: a file of this folder, or "package.module:Class".

    Raises EncodingError when no encoding has that name, its options are invalid, or one from
    outside fails.
    """
    kind = find(spec.name)
    try:
        encoding = kind.create(spec.options, config, context, device)
        for layer in range(config.num_layers):
            own = encoding.for_layer(layer)
            if isinstance(own, PositionalEncoding):  # else `check_hooks` says so
                _ = own.query_scales(), own.forget_gates()  # which a program asks before `freeze`
    except EncodingError:
        raise
    except Exception as error:  # foreign code may raise anything
        if ":" not in spec.name or is_out_of_memory(error):
            raise
        raise EncodingError(
            f"{kind.__name__} fails as it is built ({where(error)}); docs/encodings.md says what a "
            "class must keep to."
        ) from error
    return encoding


def inherits(
    hook: str, encoding: PositionalEncoding, kind: type["PositionalEncoding"] = PositionalEncoding
) -> bool:
    """Whether a hook of an encoding, by name, is as the class `kind` defines it.

    False as well for one that was set on the object. Not by comparing bound methods, which
    torch.compile takes for different ones.
    """
    return getattr(type(encoding), hook) is getattr(kind, hook) and hook not in vars(encoding)


def embeds(encoding: PositionalEncoding) -> bool:
    """Whether the encoding adds something to the embeddings."""
    return not (inherits("embed", encoding) and inherits("vectors", encoding))


def rotates(encoding: PositionalEncoding) -> bool:
    """Whether the encoding changes queries or keys before keys are stored."""
    return not inherits("rotate", encoding)


def forgets(encoding: PositionalEncoding) -> bool:
    """Whether the encoding of a layer has gates."""
    return not inherits("gates", encoding) or encoding.forget_gates() is not None


def asks_query(encoding: PositionalEncoding) -> bool:
    """Whether the bias of a layer depends on the query itself."""
    return not inherits("query_bias", encoding)


def asks_keys(encoding: PositionalEncoding) -> bool:
    """Whether the bias of a layer depends on queries and keys together."""
    return not inherits("content_bias", encoding)


def by_content(encoding: PositionalEncoding) -> bool:
    """Whether what is added to a layer's scores depends on what tokens are."""
    return forgets(encoding) or asks_query(encoding) or asks_keys(encoding)


def stored_gates(encoding: PositionalEncoding, config: ModelConfig) -> int:
    """How many gates of each token a layer of the cache has to hold."""
    layers = map(encoding.for_layer, range(config.num_layers))
    return config.num_heads if any(map(forgets, layers)) else 0


def need_integer(encoding: str, name: str, value: object, least: int, most: int) -> None:
    """Raises EncodingError unless `value` is an integer within these bounds."""
    if type(value) is not int or not least <= value <= most:
        raise EncodingError(
            f"{encoding}'s {name} must be an integer from {least} to {most}, but is {value!r}."
        )


def need_table(encoding: str, rows: int, columns: int) -> None:
    """Raises EncodingError where a table for all served positions would be too large."""
    if rows * columns > MAX_TABLE:
        raise EncodingError(
            f"{encoding} would need a table of {rows} by {columns} numbers, more than the "
            f"{MAX_TABLE} allowed; serve a shorter context with --max-model-len."
        )


def chunks(positions: int) -> Iterator[Tensor]:
    """Positions 0 .. positions - 1, some at a time: what is computed from them may be large."""
    return iter(torch.split(torch.arange(positions), CHUNK))


def need_scale(encoding: str, scale: object) -> None:
    """Raises EncodingError unless `scale` is finite and above 0."""
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise EncodingError(
            f"{encoding}'s scale must be a finite number above 0, but is {scale!r}."
        )


def freeze_all(module: nn.Module) -> None:
    """Freeze every encoding inside a module, itself included, once its weights are loaded."""
    for each in module.modules():
        if isinstance(each, PositionalEncoding):
            each.freeze()


def find(name: str) -> type[PositionalEncoding]:
    """The class that a name refers to, as in `create`. Raises EncodingError."""
    module_name, _, class_name = name.partition(":")
    if not class_name:
        if name not in names():
            known = ", ".join(names())
            raise EncodingError(
                f"There is no encoding {name!r}; use one of {known}, or package.module:Class."
            )
        module_name = f"{__package__}.{name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EncodingError(
            f"Encoding {name!r} cannot be imported: {error}; is its folder in PYTHONPATH?"
        ) from error
    except Exception as error:  # foreign code may raise anything
        raise EncodingError(
            f"Encoding {name!r} cannot be imported ({in_one_line(error)}); python -c 'import "
            f"{module_name}' shows where."
        ) from error
    candidates = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PositionalEncoding)
        and value is not PositionalEncoding
        and (value.__name__ == class_name if class_name else value.__module__ == module_name)
    ]
    if len(candidates) != 1:
        raise EncodingError(
            f"Encoding {name!r} must name exactly one PositionalEncoding class, "
            f"but {len(candidates)} were found."
        )
    return candidates[0]
