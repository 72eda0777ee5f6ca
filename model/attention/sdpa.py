"""Attention through torch's scaled_dot_product_attention: any device, any bias, no compiler.

Gathers each request's blocks into a padded tensor and masks by index. Reads the cache once more
than a paged kernel would, so it is the fallback, not the fast path.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.kv import PagedKV
from ropewalk.model.attention.base import AttentionSpec, DenseBias, StepBias, capped, forgotten
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import ContentBias, QueryBias, Scored
from ropewalk.model.encodings.common.rotary import Rotation


class SdpaAttention:
    """Serves every spec: one call for all requests of a step, or several if the step is large."""

    name = "sdpa"
    # Limit on a call's padded query-key pairs. Padding one prompt to another request's
    # context, or many requests to a prompt's length, would take gigabytes.
    most_pairs = 1 << 22
    most_scores = 1 << 20  # at a time, where they are more than torch's function computes

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
        parts = self._parts(batch)
        if len(parts) == 1:
            return self._attend(q, kv, batch, bias, rotation)
        out = torch.empty_like(q)
        for requests in parts:
            own, rows = batch.of(requests)
            if isinstance(bias, DenseBias):
                of_own = DenseBias(bias.values[:, rows, : own.max_context])
                out[rows] = self._attend(q[rows], kv, own, of_own, rotation)
            elif isinstance(bias, QueryBias):
                of_queries = QueryBias(bias.table[:, rows])
                out[rows] = self._attend(q[rows], kv, own, of_queries, rotation)
            else:
                out[rows] = self._attend(q[rows], kv, own, bias, rotation)
        return out

    def _parts(self, batch: ForwardBatch) -> list[list[int]]:
        """Requests to process together: all; or else those with one query, and each other alone."""
        requests = list(range(len(batch.context_lens)))
        pairs = len(requests) * batch.max_query * batch.max_context
        if pairs <= self.most_pairs:
            return [requests]
        counts = batch.query_starts.diff().tolist()
        single = [each for each in requests if counts[each] == 1]
        return [*filter(None, [single]), *([each] for each in requests if counts[each] > 1)]

    def _attend(
        self,
        q: Tensor,
        kv: PagedKV,
        batch: ForwardBatch,
        bias: StepBias | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """Attend for all requests of `batch`, padded to the longest."""
        keys, values = self._gather(kv, batch, q.dtype)
        rows = self._padded_rows(batch)  # [R, max_query]
        positions, key_positions = batch.positions, batch.key_positions(kv.keys.shape[1])
        index = self._query_index(batch)
        gap = index[:, :, None] - torch.arange(keys.shape[2], device=q.device)
        used = torch.arange(keys.shape[2], device=q.device) < batch.context_lens[:, None]
        hidden = gap < 0 if self.spec.causal else (~used)[:, None].expand_as(gap).clone()
        if self.spec.window is not None:
            hidden |= gap >= self.spec.window
        # Rounding the bias to bfloat16 would dominate the error, but on other devices than the CPU
        # torch's function takes no wider mask.
        explicit = self.spec.cap is not None or isinstance(bias, ContentBias)
        exact = torch.promote_types(q.dtype, torch.float32)
        wide = exact if explicit or q.device.type == "cpu" else q.dtype
        mask = torch.zeros_like(gap, dtype=wide).masked_fill(hidden, -torch.inf)[:, None]
        if isinstance(bias, DenseBias):
            mask = mask + bias.values[:, rows].transpose(0, 1).to(wide)
        elif isinstance(bias, QueryBias):
            distance = positions[rows][..., None] - key_positions[:, None]
            mask = mask + bias.at(rows, distance).transpose(0, 1).to(wide)
        elif bias is not None and not isinstance(bias, ContentBias):
            between = bias.between(positions[rows], key_positions)
            mask = mask + between.transpose(0, 1).to(wide)
        if self.spec.gated:
            sums = forgotten(kv, batch)
            own = index.clamp(0, sums.shape[2] - 1)[:, None].expand(-1, sums.shape[1], -1)
            mask = mask + (sums[:, :, None] - sums.gather(2, own)[..., None]).to(wide)
        if rotation is not None:
            offsets = torch.arange(keys.shape[2], device=q.device) % kv.keys.shape[1]
            stored = keys.transpose(1, 2)  # [R, max_context, kv_heads, head_dim]
            (q, near), far = rotation.sides(
                *(q, stored.flatten(0, 1), positions, key_positions.flatten()),
                offsets.repeat(len(stored)),
            )
            keys = near.view(stored.shape).transpose(1, 2)
            if rotation.far is not None and far is not None:
                # Every key twice, each time beside its own query, and seen as near or as far.
                none, far_keys = torch.zeros_like(keys), far[1].view(stored.shape).transpose(1, 2)
                near_keys = torch.cat((keys, none), dim=-1)
                keys = torch.cat((near_keys, torch.cat((none, far_keys), dim=-1)), dim=2)
                q, values = torch.cat((q, far[0]), dim=-1), torch.cat((values, values), dim=2)
                is_far = rotation.far.between(positions[rows], key_positions)[:, None]
                near_mask = mask.masked_fill(is_far, -torch.inf)
                mask = torch.cat((near_mask, mask.masked_fill(~is_far, -torch.inf)), dim=-1)
        padded = q[rows].transpose(1, 2)  # [R, heads, max_query, head_dim]
        if explicit:
            at = positions[rows], key_positions
            out = self._explicit(padded, keys.to(exact), values, mask, bias, *at)
        else:
            grouped = self.spec.num_heads > self.spec.num_kv_heads
            out = F.scaled_dot_product_attention(
                padded, keys, values, attn_mask=mask, scale=self.spec.scale, enable_gqa=grouped
            )
        # Not by a boolean mask, whose number of true values would have to be read from the device.
        request = batch.row_requests()
        column = torch.arange(len(request), device=q.device) - batch.query_starts[request]
        return out.transpose(1, 2)[request, column]

    def _explicit(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        bias: StepBias | None,
        positions: Tensor,
        key_positions: Tensor,
    ) -> Tensor:
        """q [R, heads, max_query, head_dim] → the same, some requests and queries at a time."""
        each = self.spec.num_heads * keys.shape[2]  # scores of a query
        requests = max(1, self.most_scores // (each * q.shape[2]))
        queries = max(1, self.most_scores // (each * min(requests, len(q))))
        found = torch.empty_like(q[..., : values.shape[-1]])
        for start in range(0, len(q), requests):
            some = slice(start, start + requests)
            scoring = _Scoring(self.spec, keys[some], values[some], bias, key_positions[some])
            for first in range(0, q.shape[2], queries):
                rows = slice(first, first + queries)
                found[some, :, rows] = scoring.attend(
                    q[some, :, rows], mask[some, :, rows], positions[some, rows]
                )
        return found

    def _gather(
        self, kv: PagedKV, batch: ForwardBatch, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, [R, kv_heads, max_context, head_dim] each."""
        longest = batch.max_context
        tables = batch.block_tables[:, : -(-longest // kv.keys.shape[1])]
        # Unwritten slots may hold anything, NaN included, and 0 · NaN is NaN.
        unused = torch.arange(longest, device=tables.device)
        unused = (unused >= batch.context_lens[:, None])[:, :, None, None]
        keys, values = (each.flatten(1, 2)[:, :longest] for each in kv.read(tables, dtype=dtype))
        keys.masked_fill_(unused, 0)
        values.masked_fill_(unused, 0)
        return keys.transpose(1, 2), values.transpose(1, 2)

    @staticmethod
    def _padded_rows(batch: ForwardBatch) -> Tensor:
        """[R, max_query]: each request's rows, padded with its first one."""
        starts = batch.query_starts
        column = torch.arange(batch.max_query, device=starts.device)
        valid = column < starts.diff()[:, None]
        return torch.where(valid, starts[:-1, None] + column, starts[:-1, None])

    @staticmethod
    def _query_index(batch: ForwardBatch) -> Tensor:
        """Index of each padded query among its request's keys, [R, max_query]."""
        first = batch.context_lens - batch.query_starts.diff()
        column = torch.arange(batch.max_query, device=first.device)
        return first[:, None] + column


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Attention whose scores torch's function cannot compute, over [R, kv_heads, K, head_dim]."""

    spec: AttentionSpec
    keys: Tensor  # at least float32, or products would be rounded
    values: Tensor
    bias: StepBias | None
    key_positions: Tensor  # [R, K]

    def attend(self, q: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """q [R, heads, Q, head_dim], what is added already [R, heads or 1, Q, K] → like q."""
        q = q.to(self.keys.dtype)
        by_group = q.reshape(len(q), self.spec.num_kv_heads, -1, q.shape[-1])
        products = (by_group @ self.keys.mT).view(*q.shape[:3], -1)
        scores = capped(products.mul_(self.spec.scale), self.spec.cap).add_(mask)
        if isinstance(self.bias, ContentBias):
            hidden = mask == -torch.inf
            scores.masked_fill_(hidden, -torch.inf)  # NaN as well, of rows that a graph leaves
            added = self.bias.of(Scored(scores, q, self.keys, positions, self.key_positions))
            scores = (scores + added).masked_fill(hidden, -torch.inf)
        weights = scores.softmax(dim=-1).to(self.values.dtype)
        return (weights.view(*by_group.shape[:3], -1) @ self.values).view(*q.shape[:3], -1)
