"""The interface to kernels: what every attention backend receives, and how one is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.kv import PagedKV
from ropewalk.cache.types import KeyStorage
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.base import (
    BIASES,
    ContentBias,
    EncodingError,
    KeyBias,
    LinearBias,
    MaterialisedBias,
    PairBias,
    PositionalEncoding,
    QueryBias,
    ScoreBias,
    Scored,
    TableBias,
    asks_keys,
    asks_query,
    exactly,
    forgets,
)
from ropewalk.model.encodings.common.rotary import Rotation

log = getLogger(__name__)


class NoBackend(ValueError):
    """No attention backend can serve the model; the message gives each one's reason."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What stays the same for one layer's attention in every step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # scores are (q · k) · scale + bias
    dtype: torch.dtype
    device: torch.device
    window: int | None = None  # keys a query attends to, its own included; None: all before it
    causal: bool = True  # False: a query attends to all keys of its request
    bias: type[ScoreBias | QueryBias | ContentBias] | None = None  # the kind added to scores
    storage: KeyStorage | None = None  # of stored keys that are not fully rotated yet
    gated: bool = False  # whether stored gates are added to scores, as `forgotten` has it
    cap: float | None = None  # (q · k) · scale is `capped` to it, before anything is added


def spec_for(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    encoding: PositionalEncoding | None = None,
) -> AttentionSpec:
    """What all layers have in common, with the bias and the rotation of the first."""
    first = None if encoding is None else encoding.for_layer(0)
    bias, storage = of_encoding(first)
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
        dtype=dtype,
        device=device,
        window=next(filter(None, config.windows), None),
        bias=bias,
        storage=storage,
        gated=first is not None and forgets(first),
        cap=config.score_cap,
    )


def of_encoding(
    encoding: PositionalEncoding | None,
) -> tuple[type[ScoreBias | QueryBias | ContentBias] | None, KeyStorage | None]:
    """What attention has to do for a layer's encoding, as in AttentionSpec."""
    if encoding is None:
        return None, None
    rotation = encoding.rotation()
    storage = None if rotation is None else rotation.storage
    if asks_query(encoding):
        return QueryBias, storage
    if asks_keys(encoding):
        return ContentBias, storage
    bias = encoding.score_bias()
    return None if bias is None else type(bias), storage


def why_not_bias(spec: AttentionSpec) -> str | None:
    """For backends whose kernels know biases by kind."""
    if spec.bias is None or issubclass(spec.bias, (*BIASES, QueryBias)):
        return None
    known = ", ".join(each.__name__ for each in BIASES)
    return f"it does not know a bias of the kind {spec.bias.__name__}, only {known}"


@dataclass(frozen=True, slots=True)
class DenseBias:
    """Adds values[head, row, key index] to the score; built for one step only."""

    values: Tensor  # [heads, T, max_context] float32


StepBias = LinearBias | TableBias | KeyBias | DenseBias | QueryBias | ContentBias


def step_bias(
    encoding: PositionalEncoding, batch: ForwardBatch, block_size: int
) -> StepBias | None:
    """What an encoding of one layer adds to its scores."""
    if asks_keys(encoding):
        return ContentBias(partial(content_bias, encoding))
    added = encoding.score_bias()
    if isinstance(added, MaterialisedBias | PairBias):
        return _dense(added, batch, block_size)
    return added


def content_bias(encoding: PositionalEncoding, seen: Scored) -> Tensor:
    """What an encoding adds to these scores. Raises EncodingError for another shape."""
    with exactly(seen.scores.device):
        found = encoding.content_bias(seen)
    if found is None or found.shape != seen.scores.shape:
        raise EncodingError(
            f"content_bias of {type(encoding).__name__} returns "
            f"{None if found is None else list(found.shape)} for scores {list(seen.scores.shape)}."
        )
    return found.to(seen.scores.dtype)


def forgotten(kv: PagedKV, batch: ForwardBatch, dtype: torch.dtype = torch.float64) -> Tensor:
    """[R, heads, max_context]: for each key, the sum of the gates of its request's later tokens.

    To the scores of a query is added what is left when that of its own token is subtracted. In
    float64, so that gates of still later tokens round nothing away.
    """
    assert kv.gates is not None, "the cache was made without room for gates"
    size, longest = kv.gates.shape[-1], batch.max_context
    tables = batch.block_tables[:, : -(-longest // size)]
    gates = kv.gates[tables].transpose(1, 2).flatten(2)[..., :longest]
    unused = torch.arange(longest, device=tables.device) >= batch.context_lens[:, None]
    gates = gates.masked_fill(unused[:, None], 0).to(dtype)  # as slots may hold anything
    return F.pad(gates.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Softly between -cap and cap (arXiv 2408.00118, section 2); None: as it is."""
    return x if cap is None else (x / cap).tanh() * cap


def _dense(bias: MaterialisedBias | PairBias, batch: ForwardBatch, block_size: int) -> DenseBias:
    keys = batch.key_positions(block_size)[batch.row_requests()]
    values = bias.between(batch.positions[:, None], keys)
    if values.shape[1:] != (len(keys), 1, keys.shape[1]):  # kernels would misread it
        raise EncodingError(
            f"score_bias returns {list(values.shape)} for queries [{len(keys)}, 1] and keys "
            f"{list(keys.shape)}; it must be [heads, ..., queries, keys]."
        )
    return DenseBias(values[:, :, 0])


class Attend(Protocol):
    """Attention of new queries over the paged cache, bias and rotation by position."""

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        batch: ForwardBatch,
        bias: StepBias | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """q [T, heads, head_dim], keys already written → [T, heads, head_dim].

        When causal, row i of request r attends to keys 0 .. context_lens[r] - rows(r) + i, by
        index. The bias is a function of positions, `batch.positions` and block base + offset,
        unless it is dense: then it is indexed by row and key index. Of a gated spec, what is
        `forgotten` is added as well. With a rotation, queries
        and stored keys are not or not fully rotated yet; `rotation` says what is left to apply.
        """
        ...


class AttentionBackend(Protocol):
    """Makes one layer's `Attend`, for example a class whose constructor takes the spec."""

    name: str

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve the spec; None when it can."""
        ...

    def __call__(self, spec: AttentionSpec) -> Attend: ...


def choose(backends: Sequence[AttentionBackend], spec: AttentionSpec) -> AttentionBackend:
    """The first backend that can serve the spec. Raises NoBackend with every reason if none can."""
    objections: list[str] = []
    for backend in backends:
        reason = backend.why_not(spec)
        if reason is None:
            if objections and spec.device.type == "cuda":  # where the first is by far fastest
                log.warning("Attention on a GPU by %s; %s", backend.name, "; ".join(objections))
            return backend
        objections.append(f"{backend.name}: {reason}")
    raise NoBackend("No attention backend fits; " + "; ".join(objections) + ".")
