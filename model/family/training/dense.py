"""Whole windows at once, with gradients: keys and values as tensors, attention as two products.

The decoder that is trained is the one that serves. A batch of windows is a paged batch in which
each request has one block as long as its window; only memory and attention differ.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache, LayerKV, PagedKV
from ropewalk.model.attention.base import AttentionSpec, DenseBias, StepBias, capped, forgotten
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import (
    ContentBias,
    PositionalEncoding,
    QueryBias,
    Scored,
    stored_gates,
)
from ropewalk.model.encodings.common.rotary import Rotation, Side
from ropewalk.model.layers.executor import TorchExecutor

QUERIES = 128  # of a window, whose scores are computed as one product


class DenseKV(KVCache):
    """New memory for every layer of every pass, so that gradients find what was written.

    It has none of its own: made for no layers, and a block for each window.
    """

    def layer(self, index: int) -> LayerKV:
        keys, values = (
            torch.empty(each.shape[1:], dtype=self.dtype, device=self.device)
            for each in (self._keys, self._values)
        )
        gates = self._gates
        if gates is not None:
            gates = torch.empty(gates.shape[1:], dtype=gates.dtype, device=self.device)
        return LayerKV(keys, values, gates=gates)


class DenseAttention:
    """For every window: scores as a product, softmax, product with the values.

    Under torch.compile, scale, bias, mask and softmax fuse into one loop. Processes some queries at
    a time, so that little is computed of what the mask hides.
    """

    name = "dense"

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        return None

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        batch: ForwardBatch,
        bias: StepBias | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """As in `Attend`, only for batches of `dense_batch`."""
        windows, length = kv.keys.shape[:2]

        def by_head(x: Tensor) -> Tensor:
            """Queries, keys or values of all rows → [windows, heads, length, head_dim]."""
            x = x.view(windows, length, -1, x.shape[-1])
            repeat = self.spec.num_heads // x.shape[2]
            return (x.repeat_interleave(repeat, dim=2) if repeat > 1 else x).transpose(1, 2)

        keys, at = kv.keys.flatten(0, 1), batch.positions
        sides: tuple[Side | None, ...] = ((q, keys),)
        if rotation is not None:
            sides = rotation.sides(q, keys, at, at, batch.offsets)
        multiplied = [(by_head(each), by_head(its)) for each, its in filter(None, sides)]
        values = by_head(kv.values)
        sums = forgotten(kv, batch, torch.float32) if self.spec.gated else None
        pieces, scale = [], self.spec.scale
        for first in range(0, length, QUERIES):
            last = min(first + QUERIES, length)
            end = last if self.spec.causal else length  # no query attends to a key after its own
            rows, columns = batch.positions[first:last], batch.positions[:end]
            scores, *far = (
                capped(queries[:, :, first:last] @ keys[:, :, :end].mT * scale, self.spec.cap)
                for queries, keys in multiplied
            )
            if rotation is not None and rotation.far is not None:
                scores = torch.where(rotation.far.between(rows, columns), far[0], scores)
            if isinstance(bias, DenseBias):
                dense = bias.values.view(-1, windows, length, length)
                scores = scores + dense[:, :, first:last, :end].transpose(0, 1)
            elif isinstance(bias, QueryBias):
                own = torch.arange(len(at), device=at.device).view(windows, length)[:, first:last]
                distance = (rows[:, None] - columns).expand(windows, -1, -1)
                scores = scores + bias.at(own, distance).transpose(0, 1)
            elif bias is not None and not isinstance(bias, ContentBias):
                scores = scores + bias.between(rows, columns)
            if sums is not None:
                scores = scores + (sums[:, :, None, :end] - sums[:, :, first:last, None])
            hidden = self._hidden(rows, columns)
            scores = scores.masked_fill(hidden, -torch.inf)
            if isinstance(bias, ContentBias):
                scores = scores.float()
                of_q = by_head(q)[:, :, first:last].float()
                of_keys = keys.view(windows, length, *keys.shape[1:]).transpose(1, 2)[:, :, :end]
                at_rows, at_columns = (each.expand(windows, -1) for each in (rows, columns))
                added = bias.of(Scored(scores, of_q, of_keys.float(), at_rows, at_columns))
                scores = (scores + added).masked_fill(hidden, -torch.inf)
            weights = scores.softmax(dim=-1)
            pieces.append(weights.to(values.dtype) @ values[:, :, :end])
        return torch.cat(pieces, dim=2).transpose(1, 2).flatten(0, 1)

    def _hidden(self, rows: Tensor, columns: Tensor) -> Tensor:
        gap = rows[:, None] - columns
        hidden = gap < 0 if self.spec.causal else torch.zeros_like(gap, dtype=torch.bool)
        return hidden if self.spec.window is None else hidden | (gap >= self.spec.window)


def dense_batch(tokens: Tensor) -> ForwardBatch:
    """tokens [windows, length], each window at positions 0 .. length - 1; all rows are output."""
    windows, length = tokens.shape
    device = tokens.device
    rows = torch.arange(windows * length, device=device)
    each = torch.arange(windows, device=device)
    return ForwardBatch(
        tokens=tokens.flatten(),
        positions=rows % length,
        offsets=rows % length,
        slots=rows,
        query_starts=torch.arange(windows + 1, device=device) * length,
        context_lens=torch.full_like(each, length),
        block_tables=each[:, None],
        block_bases=torch.zeros_like(each)[:, None],
        output_rows=rows,
        max_query=length,
        max_context=length,
    )


def dense_logits(decoder: TorchExecutor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """[windows, length] → [windows · length, vocab], with gradients.

    dtype: that of projected keys; bfloat16 under such an autocast.
    """
    windows, length = tokens.shape
    config = decoder.program.config
    kv = DenseKV(
        replace(config, num_layers=0),
        blocks=windows,
        block_size=length,
        dtype=dtype,
        device=tokens.device,
        gates=stored_gates(decoder.program.encoding, config),
    )
    return decoder.compute(dense_batch(tokens), kv)


def refreeze(decoder: TorchExecutor) -> None:
    """Recompute what the encoding derives from its parameters, so that gradients reach these.

    Tensors left by the previous pass belong to its graph: they are detached first, so that
    `freeze` may write into them. Others take their places, as views cannot be detached in place.
    """
    for module in decoder.program.encoding.modules():
        if isinstance(module, PositionalEncoding):
            for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
                if isinstance(value, Tensor):
                    setattr(module, name, value.detach())
            module.freeze()
