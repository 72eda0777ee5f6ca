"""The interface to kernels: what every attention backend receives, and how one is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.cache.kv import PagedKV
from ropewalk.model.attention.bias import StepBias
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import ModelConfig
from ropewalk.model.encodings.common.rotary import Rotation

log = getLogger(__name__)


class NoBackend(ValueError):
    """No attention backend can serve the model; the message gives each one's reason."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What stays the same for one layer's attention in every step."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # scores are (q · k) · scale + bias
    dtype: torch.dtype
    device: torch.device
    window: int | None = None  # keys a query attends to, its own included; None: all before it
    causal: bool = True  # False: a query attends to all keys of its request


def spec_for(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int | None = None,
    causal: bool = True,
) -> AttentionSpec:
    """The spec of a layer with this window; without arguments, what all layers have in common."""
    return AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
        dtype=dtype,
        device=device,
        window=window,
        causal=causal,
    )


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
        unless it is dense: then it is indexed by row and key index. With a rotation, queries
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
