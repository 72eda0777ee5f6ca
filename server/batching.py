"""From a plan to the tensors of one step, over one host buffer and one copy to the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from cache.manager import Table
from model.batch import ForwardBatch
from server.request import Request
from server.scheduler import Work


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows that predict prompt tokens: row i of `rows` predicts token `first` + i."""

    request: Request
    first: int
    rows: slice


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model computes, and whose each row of its logits is."""

    forward: ForwardBatch
    samples: tuple[tuple[Request, int], ...]  # the request, and its row of the logits
    prompts: tuple[PromptRows, ...]


def build_batch(
    work: tuple[Work, ...],
    table_of: Callable[[str], Table],
    block_size: int,
    device: torch.device,
) -> StepBatch:
    """Pack `work` in order. All tensors are views of one int64 buffer on the device."""
    tables = [table_of(item.request.id) for item in work]
    counts = [item.count for item in work]
    ends = list(accumulate(counts))
    outputs, samples, prompts = _outputs(work, [0, *ends])
    total, requests = ends[-1], len(work)
    width = max(len(table.blocks) for table in tables)
    sizes = [total] * 4 + [requests + 1, requests, requests * width, requests * width, len(outputs)]
    host = np.zeros(sum(sizes), dtype=np.int64)
    tokens, positions, offsets, slots, starts, contexts, blocks, bases, wanted = _split(host, sizes)
    starts[1:] = ends
    wanted[:] = outputs
    for row, (item, table, end) in enumerate(zip(work, tables, ends, strict=True)):
        rows = slice(end - item.count, end)
        stop = item.start + item.count
        here = slice(row * width, row * width + len(table.blocks))
        blocks[here] = table.blocks
        bases[here] = table.bases
        contexts[row] = stop
        tokens[rows] = item.request.tokens[item.start : stop]
        index = np.arange(item.start, stop)
        block, offsets[rows] = np.divmod(index, block_size)
        positions[rows] = bases[here][block] + offsets[rows]
        slots[rows] = blocks[here][block] * block_size + offsets[rows]
    on_device = torch.from_numpy(host).to(device)
    parts = [on_device[a:b] for a, b in pairwise([0, *accumulate(sizes)])]
    forward = ForwardBatch(
        tokens=parts[0],
        positions=parts[1],
        offsets=parts[2],
        slots=parts[3],
        query_starts=parts[4],
        context_lens=parts[5],
        block_tables=parts[6].view(requests, width),
        block_bases=parts[7].view(requests, width),
        output_rows=parts[8],
        max_query=max(counts),
        max_context=int(contexts.max()),
    )
    return StepBatch(forward, tuple(samples), tuple(prompts))


def _split(host: np.ndarray, sizes: list[int]) -> Iterator[np.ndarray]:
    return (host[a:b] for a, b in pairwise([0, *accumulate(sizes)]))


def _outputs(
    work: tuple[Work, ...], starts: list[int]
) -> tuple[list[int], list[tuple[Request, int]], list[PromptRows]]:
    """Rows of the batch whose logits are wanted, and what each is wanted for."""
    rows: list[int] = []
    samples: list[tuple[Request, int]] = []
    prompts: list[PromptRows] = []
    for item, start in zip(work, starts, strict=False):
        request = item.request
        predicting = min(item.start + item.count, request.num_prompt - 1) - item.start
        if request.params.prompt_logprobs is not None and predicting > 0:
            logits = slice(len(rows), len(rows) + predicting)
            prompts.append(PromptRows(request, item.start + 1, logits))
            rows.extend(range(start, start + predicting))
        if item.samples:
            samples.append((request, len(rows)))
            rows.append(start + item.count - 1)
    return rows, samples, prompts
