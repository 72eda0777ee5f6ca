"""PaTH, under which appending does rewrite what is stored: a token changes all keys before it.

For the audit alone. Blocks of such keys cannot be shared, as no two sequences that go on
differently agree about the keys of what they have in common.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.model.attention.base import capped
from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.config import EncodingSpec
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.nope import NoPE
from ropewalk.model.layers.executor import Pass, TorchExecutor, in_heads
from ropewalk.model.program import (
    Attend,
    Forget,
    Linear,
    Op,
    Part,
    Place,
    Program,
    Rotate,
    ScaleQueries,
    Store,
)

SEED = 0


@dataclass(frozen=True, slots=True)
class AttendPath(Op):
    """Reads n q k v and writes y, as Rotate, Store and Attend do of other encodings.

    Each token has a direction w of unit length and a strength s between 0 and 2, of the layer's
    input. Keys before it are multiplied by 1 - s · w · wᵀ, and then it attends (arXiv 2505.16381,
    section 3, without the convolution in front of w).
    """

    attend: Attend
    directions: Tensor  # [kv_heads · head_dim, hidden_size]
    strengths: Tensor  # [kv_heads, hidden_size]
    part: Part = Part.ATTENTION


class PathExecutor(TorchExecutor):
    """One request at a time, token by token."""

    name = "path"

    def _how(self, op: Op) -> Callable[..., Sequence[Tensor]]:
        return _attend if isinstance(op, AttendPath) else super()._how(op)


def decoder(program: Program) -> Decoder:
    """`program` with PaTH in place of its encoding; directions and strengths are random."""
    config = replace(program.config, encoding=EncodingSpec("nope", {}))
    made = replace(program, config=config, encoding=NoPE(), ops=tuple(_ops(program)))
    return Decoder(made, PathExecutor(made, SdpaAttention))


def count_rewritten(kv: KVCache, start: int, stop: int) -> int:
    """How many keys a pass over the tokens `start` to `stop` rewrites, each token all before it."""
    return sum(range(start, stop)) * kv.num_layers * kv.num_kv_heads


def _ops(program: Program) -> Iterator[Op]:
    generator, x = torch.Generator().manual_seed(SEED), ""

    def drawn(rows: int, op: Attend) -> Tensor:
        size = rows * op.num_kv_heads, program.config.hidden_size
        made = torch.empty(size, dtype=program.dtype)
        return made.normal_(0, size[1] ** -0.5, generator=generator)

    for op in program.ops:
        match op:
            case Linear(reads=reads, writes="q k v"):
                x = reads
                yield op
            case Place() | Forget() | ScaleQueries() | Rotate() | Store():
                pass
            case Attend():
                yield AttendPath(f"{x} q k v", op.writes, op, drawn(op.head_dim, op), drawn(1, op))
            case _:
                yield op


def _attend(op: AttendPath, now: Pass, x: Tensor, *values: Tensor) -> Sequence[Tensor]:
    batch, own, kv = now.batch, op.attend, now.layer(op.attend.layer)
    q, k, v = (in_heads(each, own.head_dim) for each in values)
    directions = F.normalize(in_heads(F.linear(x, op.directions), own.head_dim), dim=-1)
    strengths = 2 * F.linear(x, op.strengths).sigmoid()[..., None]
    index, size = torch.arange(batch.max_context), kv.keys.shape[1]
    slots = batch.block_tables[0, index // size] * size + index % size
    keys, stored_values = kv.keys.flatten(0, 1), kv.values.flatten(0, 1)  # views
    found, repeat = [], own.num_heads // own.num_kv_heads
    for row, (direction, strength) in enumerate(zip(directions, strengths, strict=True)):
        count = batch.max_context - len(x) + row  # tokens before this one
        before = keys[slots[:count]]
        along = (before * direction).sum(dim=-1, keepdim=True)
        keys[slots[:count]] = before - strength * along * direction
        this = slice(row, row + 1)
        kv.write(k[this], v[this], batch.slots[this])
        seen = slots[max(0, count + 1 - (own.window or count + 1)) : count + 1]
        here, there = (
            each[seen].repeat_interleave(repeat, dim=1) for each in (keys, stored_values)
        )
        weights = capped(torch.einsum("hd,khd->hk", q[row], here) * own.scale, own.cap).softmax(
            dim=-1
        )
        found.append(torch.einsum("hk,khd->hd", weights, there).flatten())
    return (torch.stack(found),)
