"""What attention computes here, one request at a time. The oracle of the tests.

Slow on purpose: nothing but indexing, products and a softmax, in float32 or wider.
"""

import torch
from torch import Tensor

from ropewalk.cache.kv import PagedKV
from ropewalk.model.attention.base import AttentionSpec, DenseBias, StepBias, capped, forgotten
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import ContentBias, QueryBias, Scored
from ropewalk.model.encodings.common.rotary import Rotation


class ReferenceAttention:
    """Serves every spec; all faster backends are compared with it."""

    name = "reference"

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        return None

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.dtype = torch.promote_types(spec.dtype, torch.float32)

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        batch: ForwardBatch,
        bias: StepBias | None,
        rotation: Rotation | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        starts = batch.query_starts.tolist()
        for r, context in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[r], starts[r + 1])
            keys, values, key_positions = self.gather(kv, batch, r, context)
            offsets = torch.arange(context, device=q.device) % kv.keys.shape[1]
            positions = batch.positions[rows]
            scores = self.scores(q[rows], keys, positions, key_positions, offsets, rotation)
            if isinstance(bias, DenseBias):
                scores = scores + bias.values[:, rows, :context]
            elif isinstance(bias, QueryBias):
                own = torch.arange(rows.start, rows.stop, device=q.device)
                scores = scores + bias.at(own, positions[:, None] - key_positions)
            elif bias is not None and not isinstance(bias, ContentBias):
                scores = scores + bias.between(positions, key_positions)
            if self.spec.gated and context:  # rows that a graph leaves unused have no keys
                sums = forgotten(kv, batch)[r, :, :context]
                own = sums[:, context - (rows.stop - rows.start) :, None]
                scores = scores + (sums[:, None] - own).to(self.dtype)
            hidden = self.hidden(rows.stop - rows.start, context, q.device)
            scores = scores.masked_fill(hidden, -torch.inf)
            if isinstance(bias, ContentBias) and context:
                of_q = q[rows].to(self.dtype).transpose(0, 1)
                of_keys = keys.transpose(0, 1)[:: self.spec.num_heads // self.spec.num_kv_heads]
                added = bias.of(Scored(scores, of_q, of_keys, positions, key_positions))
                scores = (scores + added).masked_fill(hidden, -torch.inf)
            weights = scores.softmax(dim=-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out

    def scores(
        self,
        q: Tensor,
        keys: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        offsets: Tensor,
        rotation: Rotation | None,
    ) -> Tensor:
        """q [rows, heads, head_dim] and gathered keys → [heads, rows, context], without bias.

        offsets [context]: of the keys, in their blocks.
        """
        queries = q.to(self.dtype)
        if rotation is None:
            return self._products(queries, keys)
        near, far = rotation.sides(queries, keys, positions, key_positions, offsets)
        if rotation.far is None or far is None:
            return self._products(*near)
        is_far = rotation.far.between(positions, key_positions)
        return torch.where(is_far, self._products(*far), self._products(*near))

    def _products(self, q: Tensor, keys: Tensor) -> Tensor:
        products = torch.einsum("qhd,khd->hqk", q, keys)
        return capped(products * self.spec.scale, self.spec.cap)

    def hidden(self, rows: int, context: int, device: torch.device) -> Tensor:
        """[rows, context]: the keys that each of the last `rows` tokens does not attend to."""
        index = torch.arange(context - rows, context, device=device)
        gap = index[:, None] - torch.arange(context, device=device)
        hidden = gap < 0 if self.spec.causal else torch.zeros_like(gap, dtype=torch.bool)
        if self.spec.window is not None:
            hidden |= gap >= self.spec.window
        return hidden

    def gather(
        self, kv: PagedKV, batch: ForwardBatch, r: int, context: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [context, heads, head_dim] and key positions [context] of request r."""
        block_size = kv.keys.shape[1]
        index = torch.arange(context, device=kv.keys.device)
        blocks = batch.block_tables[r][index // block_size]
        offsets = index % block_size
        repeat = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (
            each.repeat_interleave(repeat, dim=1)
            for each in kv.read(blocks, offsets, dtype=self.dtype)
        )
        positions = batch.block_bases[r][index // block_size] + offsets
        return keys, values, positions
