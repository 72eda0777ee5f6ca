"""Builds the tensors of one step, in host memory, from a plan's work.

While the same requests decode, the last step's batch is updated in place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from ropewalk.cache.manager import Table
from ropewalk.model.batch import Cross, ForwardBatch
from ropewalk.model.config import Pooling
from ropewalk.server.scheduling.request import Request, Work


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
    guess: int | None = None  # a draft of it


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
    starts = [0, *accumulate(item.width for item in work)]
    outputs, samples, prompts = _outputs(work, starts)
    forward = _pack(spans, outputs, block_size)
    if work[0].request.source:
        cross = _cross(forward, work, list(map(len, parts)), table_of, block_size)
        forward = replace(forward, cross=cross)
    return StepBatch(forward, tuple(samples), tuple(prompts))


def _spans(work: Work, table: Table) -> Iterator[_Span]:
    """The tokens to compute, 0 for one that only the device knows yet: its prompt's together."""
    tokens = work.request.context(work.start, work.start + work.count) or [0] * work.count
    tokens += work.drafts
    of_prompt = max(0, work.request.context_prompt - work.start)
    if of_prompt:
        yield _Span(tokens[:of_prompt], work.start, table)
    for index in range(of_prompt, work.width):
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
    parts = torch.from_numpy(host).split_with_sizes(sizes)
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
            place, row = known - request.num_prompt, start + item.count - 1
            for after, guess in enumerate((*item.drafts, None)):
                samples.append(Sample(request, len(rows), place + after, guess))
                rows.append(row + after)
    return rows, samples, prompts


def build_hidden(
    work: tuple[Work, ...], table_of: Callable[[str], Table], block_size: int
) -> tuple[ForwardBatch, list[slice]]:
    """A batch whose results are hidden states, and which of these each work's embedding is of.

    Of those that take the last token's state, there are none before the last token.
    """
    spans = [
        _Span(each.request.tokens[each.start : each.start + each.count], each.start, table)
        for each in work
        for table in [table_of(each.request.id)]
    ]
    rows: list[int] = []
    parts = []
    for each, end in zip(work, accumulate(each.count for each in work), strict=True):
        count = each.count if each.request.pooling is Pooling.MEAN else int(each.samples)
        parts.append(slice(len(rows), len(rows) + count))
        rows.extend(range(end - count, end))
    return replace(_pack(spans, rows, block_size), hidden=True), parts


class StepBatches:
    """Builds batches for work on one cache. A batch is valid until the next one is built."""

    def __init__(self, table_of: Callable[[str], Table], block_size: int) -> None:
        self._table_of = table_of
        self._block_size = block_size
        self._decoding: _Decoding | None = None

    def of(self, work: tuple[Work, ...]) -> StepBatch:
        """Like `build_batch`."""
        if self._decoding is not None and self._decoding.advance(work):
            return self._decoding.batch
        batch = build_batch(work, self._table_of, self._block_size)
        decoding = all(
            each.width == 1 and each.samples and each.start >= each.request.context_prompt
            for each in work
        )
        self._decoding = None
        if decoding:
            self._decoding = _Decoding(batch, work, self._table_of, self._block_size)
        return batch


class _Decoding:
    """A batch of one token per request, which is advanced from step to step."""

    def __init__(
        self,
        batch: StepBatch,
        work: tuple[Work, ...],
        table_of: Callable[[str], Table],
        block_size: int,
    ) -> None:
        self.batch = batch
        self._work = work
        self._steps = 0  # since `work`
        self._held = [table_of(each.request.id).blocks for each in work]
        self._table_of = table_of
        self._block_size = block_size
        forward = batch.forward
        self._tokens = forward.tokens.numpy()
        self._positions = forward.positions.numpy()
        self._offsets = forward.offsets.numpy()
        self._slots = forward.slots.numpy()
        self._blocks = forward.block_tables.numpy()
        self._bases = forward.block_bases.numpy()
        # Positions, offsets, slots and context lengths are adjacent: one operation adds to all.
        self._counting = as_strided(self._positions, (4 * len(work),))
        self._until_full = self._first_full()

    def _first_full(self) -> int:
        """Steps until some request begins a block."""
        return self._block_size - int(self._offsets.max())

    def advance(self, work: tuple[Work, ...]) -> bool:
        """Advance to each request's next token. False, and unusable then, if `work` differs."""
        self._steps += 1
        if len(work) != len(self._work):
            return False
        if not all(map(self._follows, work, self._work, self._held)):
            return False
        self._counting += 1
        self._until_full -= 1
        if not self._until_full:
            for row in np.flatnonzero(self._offsets == self._block_size).tolist():
                if not self._next_block(row, work[row]):
                    return False
            self._until_full = self._first_full()
        for row, each in enumerate(work):
            tokens, place = each.request.tokens, each.start + each.request.dropped
            self._tokens[row] = tokens[place] if place < len(tokens) else 0
        forward = self.batch.forward
        self.batch = replace(
            self.batch,
            forward=replace(forward, max_context=forward.max_context + 1),
            samples=tuple(sample._replace(place=sample.place + 1) for sample in self.batch.samples),
        )
        return True

    def _follows(self, work: Work, first: Work, blocks: object) -> bool:
        """Whether it is the next token of the same request, whose list of blocks only grew."""
        return (
            work.request is first.request
            and work.start == first.start + self._steps
            and work.width == 1
            and self._table_of(work.request.id).blocks is blocks
        )

    def _next_block(self, row: int, work: Work) -> bool:
        """Move a request to the start of its next block; False if the table has no column left."""
        index = work.start // self._block_size
        if index == self._blocks.shape[1]:
            return False
        blocks, bases = self._table_of(work.request.id)
        self._blocks[row, index], self._bases[row, index] = blocks[index], bases[index]
        self._positions[row], self._offsets[row] = bases[index], 0
        self._slots[row] = blocks[index] * self._block_size
        return True
