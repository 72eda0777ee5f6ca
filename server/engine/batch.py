"""Builds the tensors of one step, in host memory, from a plan's work."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ropewalk.cache.manager import Table
from ropewalk.model.batch import Cross, ForwardBatch
from ropewalk.server.scheduling.plan import Work
from ropewalk.server.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows that predict prompt tokens: row i of `rows` predicts token `first` + i."""

    request: Request
    first: int
    rows: slice


class Sample(NamedTuple):
    """A token to be picked."""

    request: Request
    row: int  # of the logits
    place: int  # of the token in the answer


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The model's input for one step, and which request each row of its logits belongs to."""

    forward: ForwardBatch
    samples: tuple[Sample, ...]
    prompts: tuple[PromptRows, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of one sequence to be computed now, the first of them at index `start`."""

    tokens: Sequence[int]
    start: int
    table: Table
    prompt: bool = True

    @property
    def count(self) -> int:
        return len(self.tokens)


def build_batch(
    work: tuple[Work, ...],
    table_of: Callable[[str], Table],
    block_size: int,
) -> StepBatch:
    """Pack `work` in order. All requests are for one model, so all or none have a source.

    A token that is not known yet is packed as 0. Every token of an answer is packed as if its
    request computed nothing else, also those that are computed again: so they are rounded as they
    were the first time, which prompts are not.
    """
    parts = [list(_spans(item, table_of(item.request.id))) for item in work]
    spans = list(chain.from_iterable(parts))
    starts = [0, *accumulate(item.count for item in work)]
    outputs, samples, prompts = _outputs(work, starts)
    forward = _pack(spans, outputs, block_size)
    if work[0].request.source:
        cross = _cross(forward, work, list(map(len, parts)), table_of, block_size)
        forward = replace(forward, cross=cross)
    return StepBatch(forward, tuple(samples), tuple(prompts))


def _spans(work: Work, table: Table) -> Iterator[_Span]:
    """The tokens to compute, 0 for one that only the device knows yet: its prompt's together."""
    tokens = work.request.context(work.start, work.start + work.count) or [0] * work.count
    of_prompt = max(0, work.request.context_prompt - work.start)
    if of_prompt:
        yield _Span(tokens[:of_prompt], work.start, table)
    for index in range(of_prompt, work.count):
        yield _Span(tokens[index : index + 1], work.start + index, table, prompt=False)


def _cross(
    forward: ForwardBatch,
    work: tuple[Work, ...],
    spans: Sequence[int],
    table_of: Callable[[str], Table],
    block_size: int,
) -> Cross:
    """The sources to encode in this step, and the encoded ones that `forward` attends to.

    spans: how many of `forward`'s each work has.
    """
    tables = [table_of(item.request.encoded) for item in work]
    sources = [item.request.source for item in work]
    new = [
        _Span(source, 0, table)
        for item, source, table in zip(work, sources, tables, strict=True)
        if item.encodes
    ]
    done = [
        _Span((), len(source), table)
        for source, table, count in zip(sources, tables, spans, strict=True)
        for _ in range(count)
    ]
    whole = _pack(done, [], block_size)
    return Cross(
        new=_pack(new, [], block_size) if new else None,
        seen=replace(
            forward,
            context_lens=whole.context_lens,
            block_tables=whole.block_tables,
            block_bases=whole.block_bases,
            max_context=whole.max_context,
        ),
    )


def _pack(spans: Sequence[_Span], outputs: Sequence[int], block_size: int) -> ForwardBatch:
    """All tensors are views of one buffer, in which positions to context lengths are adjacent."""
    counts = [span.count for span in spans]
    ends = list(accumulate(counts))
    total, requests = ends[-1], len(spans)
    width = max(len(span.table.blocks) for span in spans)
    tables = requests * width
    sizes = [total] * 4 + [requests, requests + 1, tables, tables, len(outputs), requests]
    host = np.zeros(sum(sizes), dtype=np.int64)
    tokens, positions, offsets, slots, contexts, starts, blocks, bases, wanted, prompts = _split(
        host, sizes
    )
    starts[1:] = ends
    wanted[:] = outputs
    prompts[:] = [span.prompt for span in spans]
    for row, span in enumerate(spans):
        here = slice(row * width, row * width + len(span.table.blocks))
        blocks[here] = span.table.blocks
        bases[here] = span.table.bases
    tokens[:] = list(chain.from_iterable(span.tokens for span in spans))
    # Vectorised over rows: most steps have many requests with one row each.
    firsts = np.array([span.start for span in spans])
    contexts[:] = firsts + counts
    request = np.repeat(np.arange(requests), counts)
    index = np.arange(total) + (firsts - starts[:-1])[request]
    block, offsets[:] = np.divmod(index, block_size)
    entry = request * width + block
    positions[:] = bases[entry] + offsets
    slots[:] = blocks[entry] * block_size + offsets
    parts = torch.split(torch.from_numpy(host), sizes)
    return ForwardBatch(
        tokens=parts[0],
        positions=parts[1],
        offsets=parts[2],
        slots=parts[3],
        context_lens=parts[4],
        query_starts=parts[5],
        block_tables=parts[6].view(requests, width),
        block_bases=parts[7].view(requests, width),
        output_rows=parts[8],
        prompts=parts[9],
        max_query=max(counts),
        max_context=int(contexts.max()),
    )


def _split(host: np.ndarray, sizes: list[int]) -> Iterator[np.ndarray]:
    return (host[a:b] for a, b in pairwise([0, *accumulate(sizes)]))


def _outputs(
    work: tuple[Work, ...], starts: Sequence[int]
) -> tuple[list[int], list[Sample], list[PromptRows]]:
    """Rows of the batch whose logits are wanted, and what each is wanted for."""
    rows: list[int] = []
    samples: list[Sample] = []
    prompts: list[PromptRows] = []
    for item, start in zip(work, starts, strict=False):
        request = item.request
        predicting = min(item.start + item.count, request.num_prompt - 1) - item.start
        if request.params.prompt_logprobs is not None and predicting > 0:
            logits = slice(len(rows), len(rows) + predicting)
            prompts.append(PromptRows(request, item.start + 1, logits))
            rows.extend(range(start, start + predicting))
        if item.samples:
            known = item.start + item.count + request.dropped
            samples.append(Sample(request, len(rows), known - request.num_prompt))
            rows.append(start + item.count - 1)
    return rows, samples, prompts
