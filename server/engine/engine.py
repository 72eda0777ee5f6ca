"""One model's loop body: plan, build batch, forward, sample, record. Called from one thread.

The auditor inspects the cache before and after each write to it. The three in the middle are the
Runner's. A request whose rows of logits are broken fails alone. Knows no asyncio, no HTTP and no
metrics: it reports what happened as events and numbers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache, tensor_on
from ropewalk.cache.manager import CacheManager
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.sampler import Picking, Sampler, ranked
from ropewalk.model.sampling import Ask, Picked
from ropewalk.server.engine.batch import PromptRows, Sample, StepBatch, StepBatches, build_hidden
from ropewalk.server.engine.cache_view import CacheView, view
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.engine.statistics import Forecast, PositionMeter, Statistics
from ropewalk.server.errors import NumericalError, RequestFailed, ServeError
from ropewalk.server.scheduling.request import (
    Outlook,
    PassTimes,
    Plan,
    Request,
    Sampled,
    StepStats,
    TokenEvent,
    TokenLogprob,
    Work,
)
from ropewalk.server.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from ropewalk.server.engine.kept_cache import KeptCache

log = getLogger(__name__)

Run = Callable[[tuple[Work, ...]], Mapping[str, Sampled]]  # by request id
Launch = Callable[[tuple[Work, ...], "Sampling | None"], "Sampling"]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step to come. With `sampling` it was launched ahead, and its passes are already timed."""

    plan: Plan
    forecast: Forecast
    sampling: "Sampling | None" = None
    timed: tuple[PassTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    events: list[TokenEvent]
    stats: StepStats


class Engine:
    """`run` turns work into tokens; `drain_times` returns the times of the passes that were timed.

    With `launch`, the next step is queued on the device before this step's tokens are read back,
    wherever its plan does not depend on them, so that the device does not wait for Python.
    """

    def __init__(
        self,
        run: Run,
        kv: KVCache,
        manager: CacheManager,
        scheduler: Scheduler,
        auditor: Auditor,
        meter: PositionMeter,
        *,
        clock: Callable[[], float] = time.monotonic,
        drain_times: Callable[[], tuple[PassTimes, ...]] = tuple,
        launch: Launch | None = None,
    ) -> None:
        self._run = run
        self._launch = launch
        self._kv = kv
        self._manager = manager
        self._scheduler = scheduler
        self._auditor = auditor
        self._statistics = Statistics(kv, manager, scheduler, meter, clock)
        self._drain_times = drain_times
        self._ahead: _Planned | None = None  # launched; to be recorded by the next step
        self._ends: list[TokenEvent] = []  # of requests that the auditor ended in this step

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def mutated_blocks(self) -> int:
        """Cached blocks found changed since the start. May be read from any thread."""
        return self._auditor.mutated_blocks

    @property
    def holds_context(self) -> bool:
        """Whether the cache, without its changed blocks, holds as long a request as at the start.

        May be read from any thread.
        """
        return self._scheduler.contexts.holds_longest

    @property
    def weights_changed(self) -> bool:
        """Whether the model answers nothing any more. May be read from any thread."""
        return self._auditor.weights_changed

    def outlook(self) -> Outlook:
        """What a new request has to expect now. Later, each step's statistics say it."""
        return self._scheduler.outlook()

    def view(self) -> CacheView:
        """A snapshot of the cache and of who holds its blocks, between two steps."""
        return view(self._manager, self._scheduler, self._auditor.view())

    @cached_property
    def kept(self) -> "KeptCache":
        """The kept sequences, for the engine's thread between two steps."""
        from ropewalk.server.engine.kept_cache import KeptCache

        kept, ledger = self._scheduler.kept, self._auditor.ledger
        return KeptCache(self._manager, kept, ledger, self._statistics.operated)

    def flush(self) -> int:
        """Drop cached blocks that no request holds; returns how many. The next step counts them."""
        forgotten = self._manager.flush()
        self._statistics.flushed(forgotten)
        return forgotten

    def submit(self, request: Request) -> None:
        """Raises ServeError when the request is refused."""
        refusal = self._auditor.refusal()
        if refusal is not None:
            raise refusal
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks. Unknown and ended ids are ignored."""
        self._scheduler.abort(request_id)
        self._statistics.forget(request_id)

    def shorten_kept(self, request: Request) -> None:
        """What is kept of an ended request ends where a stop string ended its answer."""
        self._scheduler.contexts.shorten_kept(request)

    def step(self) -> Step:
        """One forward pass, or nothing when idle; the counts are right either way."""
        self._statistics.begin()
        now = self._ahead or self._planned(self._scheduler.plan())
        now, self._ahead = self._launched(now)
        sampled = self._sampled(now)
        events = self._scheduler.record(now.plan, sampled)
        events = self._audited(events)
        if not self._scheduler.running:
            self._ahead = None  # no request is left to take its tokens
        timed = now.timed + self._drain_times()
        audit = self._auditor.drain()
        return Step(events, self._statistics.end(now.plan, now.forecast, events, audit, timed))

    def _planned(self, plan: Plan) -> _Planned:
        ends = self._auditor.look()  # at shared and released blocks, before they are overwritten
        self._ends += ends
        plan = _without(plan, ends)
        return _Planned(plan, self._statistics.forecast(plan))

    def _audited(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """A request that the auditor ended gets its error and no other event of this step."""
        self._ends += self._auditor.look() + self._auditor.sample()
        self._ends += self._scheduler.end_late()
        ends, self._ends = self._ends, []
        ended = {event.request_id for event in ends}
        return [*(event for event in events if event.request_id not in ended), *ends]

    def _launched(self, now: _Planned) -> tuple[_Planned, _Planned | None]:
        """`now` and the step after it, both launched if the scheduler can foresee that step."""
        if self._launch is None:
            return now, None
        foreseen = self._scheduler.foresee(now.plan)
        following = foreseen and self._planned(foreseen)
        if not following or not following.plan.work:  # the auditor may have ended all requests
            return now, None
        try:
            if now.sampling is None:
                sampling = self._launch(now.plan.work, None)
                now = replace(now, sampling=sampling, timed=self._drain_times())
            sampling = self._launch(following.plan.work, now.sampling)
            return now, replace(following, sampling=sampling, timed=self._drain_times())
        except torch.AcceleratorError:
            raise
        except Exception:  # computing it without launching ahead shows which request fails
            log.warning("a step could not be launched ahead", exc_info=True)
            return now, None

    def _sampled(self, now: _Planned) -> Mapping[str, Sampled]:
        if now.sampling is not None:
            try:
                return now.sampling.result()
            except torch.AcceleratorError:
                raise
            except Exception:  # `_compute` below finds the request that fails
                log.warning("the tokens of a step could not be read", exc_info=True)
                self._ahead = None  # it continues from tokens that are lost
        # Requests aborted since this was planned hold no blocks any more.
        work = tuple(each for each in now.plan.work if self._scheduler.runs(each.request))
        return self._compute(work) if work else {}

    def _compute(self, work: tuple[Work, ...]) -> Mapping[str, Sampled]:
        """Next tokens. A batch that fails is halved until the failing request is alone."""
        try:
            return self._run(work)
        except torch.AcceleratorError:
            raise  # the device is lost: every later call would fail too
        except Exception as error:  # one request's error, of any kind, must not fail the others
            if len(work) == 1:
                log.exception("a request failed alone")
                return {work[0].request.id: Sampled(0, error=_as_failure(error))}
        # Outside the handler: there the traceback still holds the memory of the failed batch.
        middle = len(work) // 2
        return {**self._compute(work[:middle]), **self._compute(work[middle:])}


def _without(plan: Plan, ends: list[TokenEvent]) -> Plan:
    """The plan without the work of requests that have ended."""
    ended = {event.request_id for event in ends}
    return replace(plan, work=tuple(work for work in plan.work if work.request.id not in ended))


def _as_failure(error: Exception) -> ServeError:
    if isinstance(error, ServeError):
        return error
    return RequestFailed(f"The model failed on this request ({type(error).__name__}).")


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
        self._table_of = manager.table
        self._batches = StepBatches(manager.table, kv.block_size)

    def __call__(self, work: tuple[Work, ...]) -> Mapping[str, Sampled]:
        """The next token of every request whose last known token is computed in this step.

        Embeddings are computed in a pass of their own, which has no logits.
        """
        answered = tuple(each for each in work if each.request.pooling is None)
        embedded = tuple(each for each in work if each.request.pooling is not None)
        found: dict[str, Sampled] = {}
        if answered:
            batch = self.build(answered)
            found |= self.sample(self._forward(batch.forward, self._kv), batch)
        if embedded:
            found |= self._pool(embedded)
        return found

    def _pool(self, work: tuple[Work, ...]) -> Mapping[str, Sampled]:
        """For each request the sum of the hidden states that its embedding is made of."""
        batch, parts = build_hidden(work, self._table_of, self._kv.block_size)
        states = self._forward(batch, self._kv)
        sums = torch.stack([states[part].sum(dim=0, dtype=torch.float64) for part in parts])
        return {
            each.request.id: Sampled(0, pooled=own) if np.isfinite(own).all() else _not_finite()
            for each, own in zip(work, sums.cpu().numpy(), strict=True)
        }

    def launch(self, work: tuple[Work, ...], after: "Sampling | None") -> "Sampling":
        """Like a call, but without waiting for the device; every request must get a token.

        Work that continues from tokens that were not read back yet takes them from `after`.
        """
        batch = self.build(work)
        forward = batch.forward
        if after is not None:
            forward = replace(forward, coming=after.tokens([each.request for each in work]))
        return Sampling(self._forward(forward, self._kv), batch, self._sampler, forward.coming)

    def build(self, work: tuple[Work, ...]) -> StepBatch:
        return self._batches.of(work)

    def sample(self, logits: Tensor, batch: StepBatch) -> Mapping[str, Sampled]:
        return sample(logits, batch, self._sampler)


class Sampling:
    """A `sample` that is under way on the device, without log-probabilities of prompts.

    logits [S, vocab]: one row of each request, in the order of `batch.samples`. With a grammar, it
    begins when its tokens are first asked for: what may come next depends on the tokens of the
    step before, which are known by then, and is looked for while the device computes `logits`.
    """

    def __init__(
        self, logits: Tensor, batch: StepBatch, sampler: Sampler, coming: Tensor | None
    ) -> None:
        """coming: the tokens before those to be picked, if the host does not know them yet."""
        self._requests = [each.request for each in batch.samples]
        self._logits, self._samples, self._sampler = logits, batch.samples, sampler
        self._failed: dict[str, Sampled] = {}
        free = all(each.matcher is None for each in self._requests)
        self._coming = coming if free else None
        if free:
            _ = self._picking

    @cached_property
    def _picking(self) -> Picking:
        asks = [self._ask(each) for each in self._samples]
        return self._sampler.begin(self._logits, asks, self._coming)

    def _ask(self, sample: Sample) -> Ask:
        ask = _ask(sample, coming=self._coming is not None)
        try:
            if ask.allowed is not None:
                ask.allowed.bits()
        except ServeError as error:  # of one request, which is then free, and ends here
            self._failed[sample.request.id] = Sampled(0, error=error)
            return replace(ask, allowed=None)
        return ask

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
        sampled = map(_sampled, picked)
        return dict(zip((each.id for each in self._requests), sampled, strict=True)) | self._failed


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
        _sampled_alone(row, ask, sampler) for row, ask in zip(rows, asks, strict=True)
    ]
    return _by_request(batch.samples, sampled)


def _by_request(samples: Sequence[Sample], sampled: Sequence[Sampled]) -> dict[str, Sampled]:
    """The first token of each, with those that follow it as far as their drafts were right."""
    found: dict[str, Sampled] = {}
    for of, each in zip(reversed(samples), reversed(sampled), strict=True):
        after = found.get(of.request.id)
        if after is not None and each.token == of.guess:
            each = replace(each, following=(replace(after, following=()), *after.following))
        found[of.request.id] = each
    return found


def _ask(sample: Sample, *, coming: bool = False) -> Ask:
    request = sample.request
    uniform = 0.0 if request.params.greedy else request.draw(sample.place)
    allowed = None
    if request.matcher is not None:
        allowed = request.matcher.allowed(request.params, sample.place)
    known = request.tokens, request.num_prompt
    return Ask(request.params, *known, uniform, allowed, coming, request.history)


def _sampled_together(rows: Tensor, asks: Sequence[Ask], sampler: Sampler) -> list[Sampled] | None:
    """None if it fails; the memory it took has been freed by then."""
    try:
        return [_sampled(each) for each in sampler.pick(rows, asks)]
    except torch.AcceleratorError:
        raise  # the device is lost for every request
    except Exception:  # one request's error, of any kind, must not fail the others
        return None


def _sampled_alone(row: Tensor, ask: Ask, sampler: Sampler) -> Sampled:
    try:
        return _sampled(sampler.pick(row[None], [ask])[0])
    except torch.AcceleratorError:
        raise
    except ServeError as error:
        return Sampled(0, error=error)
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
