"""Which requests run in a step, from which token, and how many. No torch, no HTTP, no metrics.

There are no prefill and decode phases: a request has known and computed tokens, and in each step
the computed ones catch up with the known ones, oldest request first, within a budget. Who is
admitted next is decided by turns (queue.py); what a request has stored is its context's affair
(contexts.py).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import InvariantError
from ropewalk.server.errors import CacheChanged, FormFailed, ServeError
from ropewalk.server.scheduling.contexts import Contexts
from ropewalk.server.scheduling.kept import CacheOperations, KeptSequences
from ropewalk.server.scheduling.queue import Queue
from ropewalk.server.scheduling.request import (
    FinishReason,
    Limits,
    Outlook,
    Overflow,
    Plan,
    Request,
    RequestSummary,
    Sampled,
    TokenEvent,
    Work,
)

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT)
# Of a step with guesses: its rows, and what it costs besides them, in rows: with SmolLM2 on two
# cores 3 to 5, less where there are more of them.
MOST_ROWS, ROWS_PER_STEP = 8, 2
BESIDE_OTHERS = 1  # guesses of a request that does not run alone: the others wait for them
QUICK = 4  # a prompt of up to one in so many of a step's tokens is short
PATIENT = 8  # beside others, prompts of those who ask for many have one in so many of its tokens
SHRUNK = (
    "The cache is smaller because blocks that changed in memory were taken out of use, and this "
    "request no longer fits; send a shorter one, or restart the server."
)


@dataclass(slots=True)
class _Budget:
    """What is left of the tokens that one step may compute."""

    left: int
    many: set[str]  # clients and lists with many requests
    left_for_many: int  # for their prompts: the others do not wait for long steps

    def limits(self, request: Request) -> bool:
        return request.turn in self.many or request.client in self.many

    def of(self, request: Request, kept: int = 0) -> int:
        """The most tokens of `request` in this step, so that `kept` stay for others; 1 or more."""
        most = self.left - kept
        if self.limits(request) and request.computed_prompt < request.num_prompt:
            most = min(most, self.left_for_many)
        return max(most, 1)

    def spend(self, work: Work) -> None:
        self.left -= work.rows
        if self.limits(work.request) and not work.decodes:
            self.left_for_many -= work.rows

    @property
    def barred(self) -> set[str]:
        """Those that start no other prompt in this step."""
        return self.many if self.left_for_many <= 0 else set()


class Scheduler:
    """Each step, computed tokens catch up with known tokens, oldest request first.

    Running requests are in the order in which they were admitted. Preemption moves the last of
    them to the front of waiting, and preempted ones are admitted again before all others. So the
    oldest is preempted last and always progresses.
    """

    def __init__(
        self,
        cache: CacheManager,
        limits: Limits,
        operations: CacheOperations,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.computed_prompt_tokens = 0  # running total, recomputation excluded
        self.forced_tokens = 0  # running total of tokens that grammars added without a draw
        self.accepted_draft_tokens = 0  # running total
        self._cache = cache
        self.limits = limits
        self._clock = clock
        # Ordered, because an abort finds its request at once.
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._queue = Queue(limits, self._running, clock)
        self.kept = KeptSequences(cache, operations, clock)
        self.contexts = Contexts(cache, operations, limits, self._running, self.kept, clock)
        self._all_fit = cache.capacity  # with this capacity every waiting request fits
        self._ended: list[tuple[str, RequestSummary]] = []  # request ids and how they ended

    @property
    def running(self) -> Collection[Request]:
        """Oldest first; every one holds blocks."""
        return self._running.values()

    @property
    def waiting(self) -> Collection[Request]:
        """Preempted ones first, then in order of arrival; none holds blocks."""
        return self._queue.waiting.values()

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises InvalidField (empty prompt, or could not finish even with the cache to itself),
        PromptTooLong, UnsupportedField, SequenceBusy and QueueFull; ValueError when the id is in
        use.
        """
        self.contexts.require_possible(request)
        if self._find(request.id) is not None:
            raise ValueError(f"request id {request.id!r} is in use")
        if request.appends:
            self.kept.require_appendable(request.keep, request.origin)
        self._queue.add(request)
        if request.appends:
            self.kept.claim(request.keep)

    def outlook(self) -> Outlook:
        return self._queue.outlook()

    def _find(self, request_id: str) -> Request | None:
        return self._running.get(request_id) or self._queue.waiting.get(request_id)

    def abort(self, request_id: str) -> Request | None:
        """End a request and free its blocks at once; None when unknown or already ended."""
        request = self._find(request_id)
        if request is not None:
            self._end(request, request.abort_as, self._clock())
        return request

    def fail(self, request_id: str, error: ServeError) -> TokenEvent | None:
        """End a request with an error, even one that finished since the last `drain_ended`.

        Blocks that it published are withdrawn if it still runs. None when the request is unknown,
        was aborted or has failed before, and for a kept sequence, which is dropped.
        """
        if self.kept.drop(request_id, forget=True):
            return None
        request = self._find(request_id)
        if request is not None:
            self._end(request, FinishReason.ERROR, self._clock(), forget=True)
            return _failure(request.id, request.cached, error)
        for index, (ended, summary) in enumerate(self._ended):
            if ended == request_id and summary.finish in ANSWERED:
                self._ended[index] = (ended, replace(summary, finish=FinishReason.ERROR))
                return _failure(ended, summary.cached_tokens, error)
        return None

    def fail_all(self, error: ServeError) -> list[TokenEvent]:
        """`fail` for every request there is, those included that finished in this very step, and
        for what is kept."""
        ids = [
            *self.kept.ids,
            *self._running,
            *self._queue.waiting,
            *(ended for ended, _ in self._ended),
        ]
        ends = [self.fail(request_id, error) for request_id in dict.fromkeys(ids)]
        return [end for end in ends if end is not None]

    def runs(self, request: Request) -> bool:
        """Whether it holds blocks; another request may have its id."""
        return self._running.get(request.id) is request

    def end_misfits(self) -> list[TokenEvent]:
        """End waiting requests that could not finish even with what is left of the cache."""
        if self._cache.capacity == self._all_fit:
            return []  # called every step, and the queue may be long
        self._all_fit = self._cache.capacity
        ends = []
        for request in tuple(self.waiting):
            if not self.contexts.fits(request):
                self._end(request, FinishReason.ERROR, self._clock())
                ends.append(_failure(request.id, request.cached, CacheChanged(SHRUNK)))
        return ends

    def end_late(self) -> list[TokenEvent]:
        """End requests that wait for longer than the limit, without any of their prompts run."""
        now, ends = self._clock(), []
        for request, error in self._queue.late(now):
            self._end(request, FinishReason.ABORT, now)
            ends.append(_failure(request.id, request.cached, error))
        return ends

    def plan(self) -> Plan:
        """The next step's work. If it preempts, it admits no request.

        Empty when idle, and when all that could run waits for blocks from the second place.
        """
        self._cache.begin_step(alone=not self._running)
        budget = self._budget()
        work: list[Work] = []
        preempted = 0
        running = tuple(self._running.values())
        quick = self._quick(budget.left)
        kept = len(running) - 1 + (quick.context_length if quick else 0)  # tokens for others
        for request in running:
            if budget.left <= 0 or request.id not in self._running:
                break
            while not self._grow(request):
                preempted += 1
                if self._preempt_newest() is request:
                    break
            else:
                work.append(self._work(request, budget.of(request, kept)))
                budget.spend(work[-1])
            kept -= 1
        admitted = [] if preempted else self._admit(work, budget, quick)
        if self.limits.draft_tokens:
            work = self._with_drafts(work, budget.left)
        self._cache.save_ahead()
        return Plan(tuple(work), preempted, tuple(admitted), *self.contexts.drain())

    def _budget(self) -> _Budget:
        """The most tokens that the next step may compute."""
        limits = self.limits
        alone = len(self._running) + len(self.waiting) == 1
        most = limits.max_step_tokens * (limits.lone_factor if alone else 1)
        many = self._queue.crowds()
        budget = _Budget(most, many, max(most // PATIENT, 1))
        if self._queue.turns.next(many) is None and all(map(budget.limits, self._running.values())):
            # Nobody else is there, but another client may come during the step.
            budget.left_for_many = max(most // (2 if limits.several_clients else 1), 1)
        return budget

    def foresee(self, plan: Plan) -> Plan | None:
        """The plan after `plan`, before that is recorded; None if it may depend on `plan`'s tokens.

        It may when some request gets no token or log-probabilities of its prompt, when another
        request may be admitted, or when the cache lacks room. Work foreseen for a request that
        turns out to have ended is skipped when it is recorded. Requests keep the blocks reserved
        here, even when the result is None.
        """
        going = [work for work in plan.work if self.runs(work.request)]
        if self._queue.may_admit() or len(going) < len(self._running):
            return None
        following = []
        for work in going:
            request, known = work.request, work.start + work.count
            noted = request.params.prompt_logprobs is not None  # by the host
            if not work.samples or work.drafts or noted or request.pooling is not None:
                return None
            if known + 1 - request.num_prompt + request.dropped >= request.params.max_tokens:
                if self.waiting:
                    return None
                continue  # it ends with the token that it gets now
            if known + 1 >= self.limits.max_context:
                return None
            if not self._cache.grow(request.id, known + 1):
                return None
            following.append(Work(request, known, 1))
        return Plan(tuple(following), preempted=0, admitted=()) if following else None

    def record(self, plan: Plan, sampled: Mapping[str, Sampled]) -> list[TokenEvent]:
        """Record an executed plan: `sampled` is by request id, for each work that samples.

        An error ends its request, whether or not its work samples. Work of requests that have
        ended meanwhile is skipped.
        """
        now = self._clock()
        events = []
        for work in plan.work:
            request = work.request
            if not self.runs(request):
                continue
            samples = work.samples
            result = sampled[request.id] if samples else sampled.get(request.id)
            if result is not None and result.error is not None:
                # Nothing it computed may reach others: not even blocks published before.
                self._end(request, _ending(result.error), now, forget=True)
                events.append(_failure(request.id, request.cached, result.error))
                continue
            self._advance(work)
            if result is not None and result.pooled is not None:
                request.add_pooled(work.start, result.pooled)
            if result is not None and samples:
                events += self._extend(request, result, now)
                events += self._accept(request, result.following, now)
        return events

    def drain_ended(self) -> list[RequestSummary]:
        """Requests that ended since the last call, however they ended."""
        ended, self._ended = self._ended, []
        return [summary for _, summary in ended]

    def check(self) -> None:
        """Raises InvariantError unless requests, limits and the cache's sequences agree."""
        waiting = self._queue.waiting
        if self._running.keys() & waiting.keys():
            raise InvariantError("a request is both running and waiting")
        encoded = {request.encoded for request in self._running.values() if request.source}
        if self._running.keys() | encoded | self.kept.ids != self._cache.sequences:
            raise InvariantError("those that run or are kept are not those that hold blocks")
        if len(self._running) > self.limits.max_seqs:
            raise InvariantError("too many requests run")
        for request in self._running.values():
            if not 0 <= request.computed < request.context_length <= self.limits.max_context:
                raise InvariantError(f"{request.id} has counts that cannot be")
        self._queue.check()
        sources = {request.encoded for request in waiting.values() if request.source}
        if not self._cache.parked <= waiting.keys() | sources:
            raise InvariantError("something is kept for a request that does not wait")

    def _work(self, request: Request, budget: int) -> Work:
        """Its next tokens. Those of an answer, if several are to be computed again, are as much
        work as those of several requests, so that a step computes no more of them."""
        known, of_prompt = request.context_length, request.context_prompt
        most = max(of_prompt - request.computed, 0) + self.limits.max_seqs
        return Work(request, request.computed, min(known - request.computed, budget, most))

    def _with_drafts(self, work: list[Work], left: int) -> list[Work]:
        """With guesses at the tokens that follow, of so many tokens at most.

        A row more costs as much as it does for another request, so a guess must be right more often
        the more rows share what a step costs by itself.
        """
        rows = sum(each.rows for each in work)
        left = min(left, MOST_ROWS - rows)
        if left <= 0:
            return work
        share = rows / (rows + ROWS_PER_STEP)
        own = self.limits.draft_tokens
        if len(work) > 1:
            own = min(own, BESIDE_OTHERS)
        drafted = []
        for each in work:
            request = each.request
            drafts: tuple[int, ...] = ()
            if left and each.samples and request.guessable:
                most = min(own, left, self._most_drafts(request))
                drafts = request.drafts.next(request.tokens, share, most)
            if drafts and not self._cache.grow(request.id, request.context_length + len(drafts)):
                drafts = ()
            left -= len(drafts)
            drafted.append(replace(each, drafts=drafts) if drafts else each)
        return drafted

    def _most_drafts(self, request: Request) -> int:
        """Fewer than would complete the answer, or fill the context."""
        answer = request.params.max_tokens - request.num_generated
        return max(0, min(answer, self.limits.max_context - request.context_length) - 1)

    def _grow(self, request: Request) -> bool:
        if self.contexts.is_full(request):  # and is shortened, which frees blocks
            self._queue.no_room = None
        return self.contexts.grow(request)

    def _preempt_newest(self) -> Request:
        """Move the newest running request to the front of the queue.

        What it has computed is kept for it; what is lost of that will be computed again.
        """
        _, request = self._running.popitem()
        request.computed_before = max(request.computed_prompt, request.computed_before)
        request.preemptions += 1
        self._queue.put_back(request)
        if not self.contexts.fits(request):
            self._all_fit = -1  # it was admitted before blocks were lost
        self.contexts.park(request)
        self._queue.no_room = None
        return request

    def _quick(self, budget: int) -> Request | None:
        """A short prompt that does not wait until a long one of another is computed.

        Short: it takes a small part of a step. Another: a list of prompts, or another client.
        """
        if not self.waiting or self._queue.no_room or len(self._running) >= self.limits.max_seqs:
            return None
        most = budget - len(self._running)
        for long in reversed(self._running.values()):
            if long.context_length - long.computed > most:
                break
        else:
            return None
        quick = self._queue.next({*self._queue.barred(), long.group or long.client})
        if quick is None or quick.admitted is not None or self.contexts.will_fork(quick):
            return None
        return quick if quick.context_length + len(quick.source) <= budget // QUICK else None

    def _admit(self, work: list[Work], budget: _Budget, quick: Request | None) -> list[Request]:
        """Admit waiting requests by turns while places, tokens and blocks last; `quick` first.

        A source is always encoded whole, so the last request admitted may exceed the budget.
        """
        first_time = []
        forking: set[str] = set()
        while self.waiting and budget.left > 0 and len(self._running) < self.limits.max_seqs:
            request = quick or self._queue.next(forking | self._queue.barred() | budget.barred)
            if request is None:
                break
            if self.contexts.will_fork(request):
                if request.admitted is not None or not request.group:
                    break
                forking.add(request.group)
                continue
            if self._queue.no_room == request.id or not self.contexts.fetched(request):
                break
            if not self.contexts.open(request):
                self._queue.no_room = request.id
                break
            quick = None
            if request.admitted is None:
                first_time.append(request)
            self._queue.admit(request)
            self._running[request.id] = request
            work.append(self._work(request, budget.of(request)))
            budget.spend(work[-1])
        return first_time

    def _advance(self, work: Work) -> None:
        request = work.request
        before = max(request.computed_prompt, request.computed_before)
        request.computed = work.start + work.count
        if not request.source:
            self.computed_prompt_tokens += max(0, request.computed_prompt - before)
        elif work.encodes and not request.computed_before:
            self.computed_prompt_tokens += len(request.source)
        self.contexts.commit(work)
        if work.start < request.num_prompt <= request.computed:
            # A waiting request with the same prompt now needs fewer blocks.
            self._queue.no_room = None

    def _extend(self, request: Request, result: Sampled, now: float) -> list[TokenEvent]:
        """Add its token, and those that its grammar has follow it."""
        forced: list[int] = []
        if request.matcher is not None:
            try:
                forced = request.matcher.advance(result.token, self._most_forced(request))
            except FormFailed as error:
                self._end(request, _ending(error), now)
                return [_failure(request.id, request.cached, error)]
        results = [result, *map(Sampled, forced)]
        events = []
        for each in results:
            events.append(self._append(request, each, now, last=each is results[-1]))
            if events[-1].finish is not None:
                break
        self.forced_tokens += len(events) - 1
        return events

    def _accept(
        self, request: Request, following: Sequence[Sampled], now: float
    ) -> list[TokenEvent]:
        """Add the tokens after drafts that were right, each as if a step had been for it."""
        events: list[TokenEvent] = []
        for each in following:
            if not self.runs(request):
                break
            if each.error is not None:
                self._end(request, _ending(each.error), now, forget=True)
                events.append(_failure(request.id, request.cached, each.error))
                break
            self._advance(Work(request, request.computed, 1))
            events.append(self._append(request, each, now, last=True))
            self.accepted_draft_tokens += 1
        return events

    def _most_forced(self, request: Request) -> int:
        """None where each token's scores are wanted; else less than would fill the context, where
        a token at a time is dropped or ends the answer."""
        if request.params.logprobs is not None:
            return 0
        return max(0, self.limits.max_context - request.context_length - 2)

    def _append(self, request: Request, result: Sampled, now: float, *, last: bool) -> TokenEvent:
        """last: whether its grammar, if any, has come no further than this token."""
        if request.pooling is not None:
            request.first_token = now
            self._end(request, FinishReason.STOP, now)
            return TokenEvent(
                request.id,
                None,
                FinishReason.STOP,
                cached_tokens=request.cached,
                embedding=request.pooled,
            )
        request.tokens.append(result.token)
        self._queue.turns.charge(request.client, 1)
        first = request.first_token is None
        if first:
            request.first_token = now
        wants_prompt = first and request.params.prompt_logprobs is not None
        finish = self._finish_reason(request)
        if finish is None and last and request.matcher is not None and request.matcher.finished:
            finish = FinishReason.STOP
        if finish is not None:
            self._end(request, finish, now)
        return TokenEvent(
            request.id,
            result.token,
            finish,
            logprob=result.logprob,
            prompt_logprobs=tuple(request.prompt_logprobs) if wants_prompt else None,
            cached_tokens=request.cached,
        )

    def _finish_reason(self, request: Request) -> FinishReason | None:
        params, generated = request.params, request.num_generated
        if generated >= params.min_tokens and request.tokens[-1] in params.stop_ids:
            return FinishReason.STOP
        if generated >= params.max_tokens:
            return FinishReason.LENGTH
        if request.overflow is Overflow.REFUSE and self.contexts.is_full(request):
            return FinishReason.CONTEXT
        return None

    def _end(
        self, request: Request, finish: FinishReason, now: float, *, forget: bool = False
    ) -> None:
        if not self._queue.remove(request):
            del self._running[request.id]
            if request.keep and finish in ANSWERED:
                self.contexts.keep(request)
            else:
                self.contexts.release(request, forget=forget)
        if request.appends:
            self.kept.unclaim(request.keep)
        if request.admitted is not None:
            self._queue.pace.end(now, request.num_generated + (request.pooling is not None))
        self.contexts.forget(request)
        self._queue.no_room = None  # blocks are free, or another request is first in the queue now
        summary = RequestSummary(
            finish=finish,
            prompt_tokens=request.prompt_length,
            cached_tokens=request.cached,
            output_tokens=request.num_generated,
            arrival=request.arrival,
            admitted=request.admitted,
            first_token=request.first_token,
            end=now,
        )
        self._ended.append((request.id, summary))


def _ending(error: ServeError) -> FinishReason:
    """Of a request that failed: what is the client's fault is not counted as the server's."""
    return FinishReason.ABORT if error.status < 500 else FinishReason.ERROR


def _failure(request_id: str, cached: int, error: ServeError) -> TokenEvent:
    return TokenEvent(request_id, None, FinishReason.ERROR, cached_tokens=cached, error=error)
