"""ForwardBatch: one step's tokens of all requests, packed, with where each one is and goes."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of R requests; request r owns rows query_starts[r]:query_starts[r+1].

    All tensors are int64, on one device. Block table entries past a request's context are 0.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]  index the encoding sees
    offsets: Tensor  # [T]  slot within its block
    slots: Tensor  # [T]  block · block_size + offset: where this token's K and V go
    query_starts: Tensor  # [R + 1]
    context_lens: Tensor  # [R]  keys visible after this step, this step's included
    block_tables: Tensor  # [R, max_blocks]
    block_bases: Tensor  # [R, max_blocks]  position of each block's offset 0
    output_rows: Tensor  # [S]  rows whose logits are wanted
    max_query: int  # host copies, so that no kernel asks the device
    max_context: int
    cross: "Cross | None" = None  # encoder-decoders only

    def key_positions(self, block_size: int) -> Tensor:
        """[R, max_context], by key index. Past a request's own context they mean nothing."""
        used = -(-self.max_context // block_size)
        offsets = torch.arange(block_size, device=self.block_bases.device)
        positions = self.block_bases[:, :used, None] + offsets
        return positions.flatten(1)[:, : self.max_context]


@dataclass(frozen=True, slots=True)
class Cross:
    """Encoded prompts, whose keys and values lie in the same cache as those of the answers."""

    new: ForwardBatch | None  # whole prompts to encode first; their slots are then filled
    seen: ForwardBatch  # the step's own rows, over the blocks of their requests' encoded prompts
