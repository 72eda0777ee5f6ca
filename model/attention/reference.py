"""What attention computes here, one request at a time. The oracle of the tests.

Slow on purpose: nothing but indexing, products and a softmax, in float32 or wider.
"""

import torch
from torch import Tensor

from ropewalk.cache.kv import PagedKV
from ropewalk.model.attention.base import AttentionSpec, DenseBias, StepBias
from ropewalk.model.batch import ForwardBatch
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
            keys, values, key_positions = self._gather(kv, batch, r, context)
            queries = q[rows].to(self.dtype)
            if rotation is not None:
                queries = rotation.queries(queries, batch.positions[rows])
                offsets = torch.arange(context, device=q.device) % kv.keys.shape[1]
                keys = rotation.keys(keys, key_positions, offsets)
            count = rows.stop - rows.start
            index = torch.arange(context - count, context, device=q.device)  # [rows]
            gap = index[:, None] - torch.arange(context, device=q.device)  # [rows, context]
            hidden = gap < 0 if self.spec.causal else torch.zeros_like(gap, dtype=torch.bool)
            if self.spec.window is not None:
                hidden |= gap >= self.spec.window
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.spec.scale
            if isinstance(bias, DenseBias):
                scores = scores + bias.values[:, rows, :context]
            elif bias is not None:
                scores = scores + bias.between(batch.positions[rows], key_positions)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out

    def _gather(
        self, kv: PagedKV, batch: ForwardBatch, r: int, context: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [context, heads, head_dim] and key positions [context] of request r."""
        block_size = kv.keys.shape[1]
        index = torch.arange(context, device=kv.keys.device)
        blocks = batch.block_tables[r][index // block_size]
        offsets = index % block_size
        repeat = self.spec.heads // self.spec.kv_heads
        keys, values = (
            each.repeat_interleave(repeat, dim=1)
            for each in kv.read(blocks, offsets, dtype=self.dtype)
        )
        positions = batch.block_bases[r][index // block_size] + offsets
        return keys, values, positions
