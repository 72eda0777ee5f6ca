"""Rows of logits to tokens of requests: who gets which row, and whose row is broken."""

from collections.abc import Mapping
from logging import getLogger

import torch
from torch import Tensor

from model.sampler import Sampler, adjust, changes_logits, top_logprobs
from server.batching import PromptRows, StepBatch
from server.request import NumericalError, Request, RequestFailed, TokenLogprob
from server.scheduler import Sampled

log = getLogger(__name__)


def sample(logits: Tensor, batch: StepBatch, sampler: Sampler) -> Mapping[str, Sampled]:
    """One token per request of `batch.samples`; prompt log-probabilities go to their requests.

    logits [S, vocab]. A row that is not finite, or cannot be sampled, fails its own request, also
    one that is not in `batch.samples`.
    """
    # Prompts first: what fails there fails before anybody's generator has drawn.
    broken = {
        prompt.request.id: _not_finite()
        for prompt in batch.prompts
        if not _note_prompt(logits[prompt.rows], prompt)
    }
    return _sample_rows(logits, batch, sampler) | broken


def _sample_rows(logits: Tensor, batch: StepBatch, sampler: Sampler) -> dict[str, Sampled]:
    if not batch.samples:
        return {}
    chosen = torch.tensor([row for _, row in batch.samples], device=logits.device)
    rows = logits if len(chosen) == len(logits) else logits[chosen]
    largest, tokens = sampler.largest(rows)
    finite, greedy = largest.isfinite().tolist(), tokens.tolist()
    return {
        request.id: _sample_alone(request, rows[i], greedy[i], sampler)
        if finite[i]
        else _not_finite()
        for i, (request, _) in enumerate(batch.samples)
    }


def _not_finite() -> Sampled:
    reason = "The model's output for this request is not finite."
    return Sampled(0, error=NumericalError(reason))


def _sample_alone(request: Request, row: Tensor, most_likely: int, sampler: Sampler) -> Sampled:
    try:
        return _sample_one(request, row, most_likely, sampler)
    except torch.AcceleratorError:
        raise  # the device is lost, for all
    except Exception as error:
        # Raised, it would have the others sampled again, with another draw of their generators.
        log.exception("sampling failed", extra={"request": request.id})
        reason = f"Sampling failed on this request ({type(error).__name__})."
        return Sampled(0, error=RequestFailed(reason))


def _sample_one(request: Request, row: Tensor, most_likely: int, sampler: Sampler) -> Sampled:
    params = request.params
    token = most_likely
    if not params.greedy or changes_logits(params, request.num_generated):
        prompt = request.tokens[: request.num_prompt]
        generated = request.tokens[request.num_prompt :]
        adjusted = adjust(row.float(), params, prompt, generated)
        if params.greedy:
            token = int(adjusted.argmax())
        else:
            token = sampler.draw(adjusted, params, request.rng.random())
    if params.logprobs is None:
        return Sampled(token)
    logprobs = row.float().log_softmax(dim=-1)
    return Sampled(token, _logprob(logprobs, token, params.logprobs))


def _note_prompt(rows: Tensor, prompt: PromptRows) -> bool:
    """Whether all rows are finite; only then they are noted."""
    if not rows.amax(dim=-1).isfinite().all():
        return False
    request, first = prompt.request, prompt.first
    count = request.params.prompt_logprobs
    assert count is not None, "only requests that want prompt log-probabilities have such rows"
    # A preempted request computes its prompt again: keep one entry per token.
    del request.prompt_logprobs[first:]
    for i, row in enumerate(rows.float().log_softmax(dim=-1)):
        request.prompt_logprobs.append(_logprob(row, request.tokens[first + i], count))
    return True


def _logprob(row: Tensor, token: int, count: int) -> TokenLogprob:
    return TokenLogprob(token, float(row[token]), top_logprobs(row, count))
