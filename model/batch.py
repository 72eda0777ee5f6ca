"""ForwardBatch: one step's tokens of all requests, packed, with their positions and cache slots."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.cache.kv import sent
from ropewalk.cache.manager import Table


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R requests; request r owns rows query_starts[r]:query_starts[r+1].

    All tensors are int64, on one device: they are built on the host, and the model moves them to
    its own device. Block table entries past a request's context are 0.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]  position that the encoding sees
    offsets: Tensor  # [T]  slot within its block
    slots: Tensor  # [T]  block · block_size + offset: where this token's K and V go
    query_starts: Tensor  # [R + 1]
    context_lens: Tensor  # [R]  keys visible after this step, this step's included
    block_tables: Tensor  # [R, max_blocks]
    block_bases: Tensor  # [R, max_blocks]  position of each block's offset 0
    output_rows: Tensor  # [S]  rows whose logits, or hidden states, are needed
    max_query: int  # host copies, so that no kernel has to read from the device
    max_context: int
    cross: "Cross | None" = None  # encoder-decoders only
    coming: Tensor | None = None  # [T]  on the device, replaces `tokens` not yet known to the host
    # [R]  1 where a request's rows are of its prompt: kernels that round prompts and answers
    # differently then go by this, not by the number of rows that a step happens to compute.
    prompts: Tensor | None = None
    hidden: bool = False  # hidden states are wanted, as the head reads them, and no logits

    def to(self, device: torch.device) -> "ForwardBatch":
        """The batch on `device`: itself if already there, else moved in one copy, plus `cross`'s.

        Its `tokens` are then `coming`, if that was set.
        """
        if self.coming is not None:
            return replace(replace(self, coming=None).to(device), tokens=self.coming)
        if self.tokens.device.type == device.type:
            return self
        names = [each.name for each in fields(self) if isinstance(getattr(self, each.name), Tensor)]
        moved = in_one_copy([getattr(self, name) for name in names], device)
        changes: dict[str, Any] = dict(zip(names, moved, strict=True))
        if self.cross is not None:
            changes["cross"] = self.cross.to(device)
        return replace(self, **changes)

    def row_requests(self) -> Tensor:
        """[T]: the request that each row belongs to."""
        # output_size spares a synchronisation with the device.
        return torch.repeat_interleave(self.query_starts.diff(), output_size=len(self.tokens))

    def of(self, requests: Sequence[int]) -> "tuple[ForwardBatch, Tensor]":
        """A batch of these requests alone, without output rows, and the indices of their rows.

        Only for a batch on the host.
        """
        starts, counts = self.query_starts[requests], self.query_starts.diff()[requests]
        contexts = self.context_lens[requests]
        rows = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(starts.tolist(), counts.tolist(), strict=True)]
        )
        own = ForwardBatch(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            offsets=self.offsets[rows],
            slots=self.slots[rows],
            query_starts=F.pad(counts.cumsum(0), (1, 0)),
            context_lens=contexts,
            block_tables=self.block_tables[requests],
            block_bases=self.block_bases[requests],
            output_rows=rows[:0],
            max_query=int(counts.max()),
            max_context=int(contexts.max()),
            prompts=None if self.prompts is None else self.prompts[requests],
        )
        return own, rows

    def key_positions(self, block_size: int) -> Tensor:
        """[R, max_context], by key index. Meaningless past a request's own context."""
        used = -(-self.max_context // block_size)
        offsets = torch.arange(block_size, device=self.block_bases.device)
        positions = self.block_bases[:, :used, None] + offsets
        return positions.flatten(1)[:, : self.max_context]


def in_order(blocks: int, block_size: int) -> Table:
    """The table of a sequence that has a cache to itself: its first blocks, in order."""
    return Table(range(blocks), range(0, blocks * block_size, block_size))


def of_one(
    tokens: Sequence[int],
    start: int,
    table: Table,
    block_size: int,
    *,
    wanted: int,
    device: torch.device,
) -> ForwardBatch:
    """Tokens from index `start` on of one sequence; logits of the last `wanted` are needed.

    `table` lists the sequence's blocks from its beginning, and may have more than needed.
    """
    count, end = len(tokens), start + len(tokens)
    index = torch.arange(start, end, device=device)
    used = -(-end // block_size)
    blocks = torch.tensor(list(table.blocks[:used]), device=device)
    bases = torch.tensor(list(table.bases[:used]), device=device)
    return ForwardBatch(
        tokens=torch.tensor(list(tokens), device=device),
        positions=bases[index // block_size] + index % block_size,
        offsets=index % block_size,
        slots=blocks[index // block_size] * block_size + index % block_size,
        query_starts=torch.tensor([0, count], device=device),
        context_lens=torch.tensor([end], device=device),
        block_tables=blocks[None],
        block_bases=bases[None],
        output_rows=torch.arange(count - wanted, count, device=device),
        max_query=count,
        max_context=end,
    )


@dataclass(frozen=True, slots=True)
class Cross:
    """Encoded prompts, whose keys and values share a cache with those of the answers."""

    new: ForwardBatch | None  # whole prompts to encode first; their slots are then filled
    seen: ForwardBatch  # the step's own rows, over the blocks of their requests' encoded prompts

    def to(self, device: torch.device) -> "Cross":
        """As ForwardBatch.to."""
        new = None if self.new is None else self.new.to(device)
        return Cross(new, self.seen.to(device))


def in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors, all of one dtype, on `device`; asynchronous, and the sources may be changed."""
    flat = torch.cat([each.flatten() for each in tensors])
    parts = torch.split(sent(flat, device), [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
