"""Turns the work of a step into tokens: build batch, forward, sample.

A request whose rows of logits are broken fails alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from math import isfinite

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache, tensor_on
from ropewalk.cache.manager import CacheManager
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.sampler import Ask, Picked, Picking, Sampler, ranked
from ropewalk.server.engine.batch import PromptRows, Sample, StepBatch, StepBatches
from ropewalk.server.errors import NumericalError, RequestFailed
from ropewalk.server.scheduling.request import Request, Sampled, TokenLogprob, Work

log = getLogger(__name__)


class Sampling:
    """A `sample` that is under way on the device, for requests none of which `needs_host`.

    logits [S, vocab]: one row of each request, in the order of `batch.samples`. With a grammar, it
    begins when its tokens are first asked for: what may come next depends on the tokens of the
    step before, which are known by then, and were looked at while the device computed `logits`.
    """

    def __init__(self, logits: Tensor, batch: StepBatch, sampler: Sampler) -> None:
        self._requests = [each.request for each in batch.samples]
        self._begin = lambda: sampler.begin(logits, [_ask(each) for each in batch.samples])
        if all(request.matcher is None for request in self._requests):
            _ = self._picking

    @cached_property
    def _picking(self) -> Picking:
        return self._begin()

    def tokens(self, requests: Sequence[Request]) -> Tensor:
        """The tokens of some of its requests, [S] on the device, perhaps not picked yet."""
        if len(requests) == len(self._requests):
            return self._picking.tokens
        places = {request.id: place for place, request in enumerate(self._requests)}
        chosen = [places[request.id] for request in requests]
        return self._picking.tokens[tensor_on(self._picking.tokens.device, chosen)]

    def result(self) -> Mapping[str, Sampled]:
        """Waits for the device."""
        picked, _ = self._picking.read()
        return {
            request.id: _sampled(each) for request, each in zip(self._requests, picked, strict=True)
        }


Run = Callable[[tuple[Work, ...]], Mapping[str, Sampled]]  # by request id
Launch = Callable[[tuple[Work, ...], Sampling | None], Sampling]


class Runner:
    """`forward` is a decoder, or in tests any function of a batch and a cache to logits."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch, KVCache], Tensor],
        kv: KVCache,
        manager: CacheManager,
        sampler: Sampler,
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._sampler = sampler
        self._batches = StepBatches(manager.table, kv.block_size)

    def __call__(self, work: tuple[Work, ...]) -> Mapping[str, Sampled]:
        """The next token of every request whose last known token is computed in this step."""
        batch = self.build(work)
        logits = self._forward(batch.forward, self._kv)
        return self.sample(logits, batch)

    def launch(self, work: tuple[Work, ...], after: Sampling | None) -> Sampling:
        """Like a call, but without waiting for the device; every request must get a token.

        Work that continues from tokens that were not read back yet takes them from `after`.
        """
        batch = self.build(work)
        forward = batch.forward
        if after is not None:
            forward = replace(forward, coming=after.tokens([each.request for each in work]))
        return Sampling(self._forward(forward, self._kv), batch, self._sampler)

    def build(self, work: tuple[Work, ...]) -> StepBatch:
        return self._batches.of(work)

    def sample(self, logits: Tensor, batch: StepBatch) -> Mapping[str, Sampled]:
        return sample(logits, batch, self._sampler)


def sample(logits: Tensor, batch: StepBatch, sampler: Sampler) -> Mapping[str, Sampled]:
    """One token per request of `batch.samples`; prompt log-probabilities go to their requests.

    logits [S, vocab]. A row that is not finite, or cannot be sampled, fails only its own
    request, even one that is not in `batch.samples`.
    """
    broken = {
        prompt.request.id: _not_finite()
        for prompt in batch.prompts
        if not _note_prompt(logits[prompt.rows], prompt, sampler)
    }
    return _sample_rows(logits, batch, sampler) | broken


def _sample_rows(logits: Tensor, batch: StepBatch, sampler: Sampler) -> dict[str, Sampled]:
    if not batch.samples:
        return {}
    rows = logits  # without prompts, all of them are of samples
    if batch.prompts:
        rows = logits[tensor_on(logits.device, [each.row for each in batch.samples])]
    asks = [_ask(each) for each in batch.samples]
    # If that fails, each is picked alone, with the same draw, to find the request at fault.
    sampled = _sampled_together(rows, asks, sampler) or [
        _sampled_alone(each.request, row, ask, sampler)
        for each, row, ask in zip(batch.samples, rows, asks, strict=True)
    ]
    return {of.request.id: each for of, each in zip(batch.samples, sampled, strict=True)}


def _ask(sample: Sample) -> Ask:
    request = sample.request
    uniform = 0.0 if request.params.greedy else request.draw(sample.place)
    allowed = request.matcher and request.matcher.allowed(request.params, sample.place)
    return Ask(request.params, request.tokens, request.num_prompt, uniform, allowed)


def _sampled_together(rows: Tensor, asks: Sequence[Ask], sampler: Sampler) -> list[Sampled] | None:
    """None if it fails; the memory it took has been freed by then."""
    try:
        return [_sampled(each) for each in sampler.pick(rows, asks)]
    except torch.AcceleratorError:
        raise  # the device is lost for every request
    except Exception:  # one request's error, of any kind, must not fail the others
        return None


def _sampled_alone(request: Request, row: Tensor, ask: Ask, sampler: Sampler) -> Sampled:
    try:
        return _sampled(sampler.pick(row[None], [ask])[0])
    except torch.AcceleratorError:
        raise
    except Exception as error:
        log.exception("sampling failed for a request")
        reason = f"Sampling failed for this request ({type(error).__name__})."
        return Sampled(0, error=RequestFailed(reason))


def _sampled(picked: Picked) -> Sampled:
    if not picked.finite:
        return _not_finite()
    if picked.logprob is None:
        return Sampled(picked.token)
    return Sampled(picked.token, TokenLogprob(picked.token, picked.logprob, picked.top))


def _not_finite() -> Sampled:
    reason = "The model's output for this request is not finite."
    return Sampled(0, error=NumericalError(reason))


def _note_prompt(rows: Tensor, prompt: PromptRows, sampler: Sampler) -> bool:
    """Append the prompt's log-probabilities if all rows are finite; returns whether they are."""
    request, first = prompt.request, prompt.first
    count = request.params.prompt_logprobs
    assert count is not None, "only requests that want prompt log-probabilities have such rows"
    tokens = request.tokens[first : first + len(rows)]
    numbers = sampler.scores(rows, tensor_on(rows.device, tokens), count).tolist()
    if not all(isfinite(largest) for largest, *_ in numbers):
        return False
    # A preempted request computes its prompt again: keep one entry per token.
    del request.prompt_logprobs[first:]
    for token, (_, own, *top) in zip(tokens, numbers, strict=True):
        request.prompt_logprobs.append(TokenLogprob(token, own, ranked(top)))
    return True
