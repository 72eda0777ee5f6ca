"""Which requests run in a step, from which token, and how many. No torch, no HTTP, no metrics.

There are no prefill and decode phases: a request has known and computed tokens, and in each step
the computed ones catch up with the known ones, oldest request first, within a budget.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from cache.block_pool import InvariantError
from cache.manager import CacheManager
from cache.terms import Fork, NoRoom, OpReport
from server.overflow import CacheOperations, ContextShifter
from server.plan import Limits, Plan, Sampled, Work
from server.request import (
    CacheChanged,
    FinishReason,
    InvalidField,
    Overflow,
    PromptTooLong,
    QueueFull,
    Request,
    RequestSummary,
    ServeError,
    TokenEvent,
)

T = TypeVar("T")

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT)
SHRUNK = (
    "The cache is smaller because blocks that changed in memory were taken out of use, and this "
    "request no longer fits; send a shorter one, or restart the server."
)


class Scheduler:
    """Each step, computed tokens catch up with known tokens, oldest request first.

    Running then waiting requests are always in the order in which they were added: admission
    moves the first waiting one to the end of running, preemption moves the last running one to
    the front of waiting. So the oldest is preempted last and always progresses.
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
        self._cache = cache
        self._operations = operations
        self._shifter = ContextShifter(operations, cache.block_size, limits.max_context, clock)
        self._limits = limits
        self._longest = min(limits.max_context - 1, cache.capacity)  # the last token is not stored
        self._clock = clock
        # Ordered dictionaries: an abort finds its request at once in a queue of any length.
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        # The first waiting request did not fit, and since then no block was freed or became shared.
        self._no_room = False
        self._all_fit = cache.capacity  # with this capacity every waiting request fits
        self._recompute: dict[str, int] = {}  # preempted: prompt tokens computed once before
        self._forks: list[OpReport] = []
        self._ended: list[tuple[str, RequestSummary]] = []  # request ids and how they ended

    @property
    def running(self) -> Collection[Request]:
        """Oldest first; every one holds blocks."""
        return self._running.values()

    @property
    def waiting(self) -> Collection[Request]:
        """Next to be admitted first; none holds blocks."""
        return self._waiting.values()

    @property
    def holds_context(self) -> bool:
        """Whether what is left of the cache holds as long a request as the whole cache did."""
        return self._cache.capacity >= self._longest

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises InvalidField (empty prompt, or could not finish even with the cache to itself),
        PromptTooLong, UnsupportedField and QueueFull; ValueError when the id is in use.
        """
        self._require_possible(request)
        self._shifter.require_possible(request)
        if request.id in self._running or request.id in self._waiting:
            raise ValueError(f"request id {request.id!r} is in use")
        if len(self._waiting) >= self._limits.max_queue + self._seats():
            raise QueueFull(
                f"All {self._limits.max_queue} places in the queue (--max-queue) are taken; retry "
                "later, or send fewer at once."
            )
        self._waiting[request.id] = request

    def _seats(self) -> int:
        """Waiting requests that the next step may admit; they do not count as queued."""
        return 0 if self._no_room else self._limits.max_seqs - len(self._running)

    def abort(self, request_id: str) -> Request | None:
        """End a request and free its blocks at once; None when unknown or already ended."""
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is not None:
            self._end(request, request.abort_as, self._clock())
        return request

    def fail(self, request_id: str, error: ServeError) -> TokenEvent | None:
        """End a request with an error, even one that finished since the last `drain_ended`.

        Blocks that it published are withdrawn if it still runs. None when the request is unknown,
        was aborted or has failed before.
        """
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ERROR, self._clock(), forget=True)
            return _failure(request, error)
        for index, (ended, summary) in enumerate(self._ended):
            if ended == request_id and summary.finish in ANSWERED:
                self._ended[index] = (ended, replace(summary, finish=FinishReason.ERROR))
                return TokenEvent(
                    ended,
                    None,
                    FinishReason.ERROR,
                    cached_tokens=summary.cached_tokens,
                    error=error,
                )
        return None

    def runs(self, request: Request) -> bool:
        """Whether it holds blocks; another request may have its id."""
        return self._running.get(request.id) is request

    def end_misfits(self) -> list[TokenEvent]:
        """End waiting requests that could not finish even with what is left of the cache."""
        if self._cache.capacity == self._all_fit:
            return []  # called every step, and the queue may be long
        self._all_fit = self._cache.capacity
        ends = []
        for request in tuple(self._waiting.values()):
            if self._room_for(request) > self._cache.capacity:
                self._end(request, FinishReason.ERROR, self._clock())
                ends.append(_failure(request, CacheChanged(SHRUNK)))
        return ends

    def plan(self) -> Plan:
        """The next step's work. If it preempts, it admits no request.

        Empty when idle, and when all that could run waits for blocks from the second place.
        """
        self._cache.begin_step(alone=not self._running)
        budget = self._budget()
        work: list[Work] = []
        preempted = 0
        for request in tuple(self._running.values()):
            if budget <= 0 or request.id not in self._running:
                break
            while not self._grow(request):
                preempted += 1
                if self._preempt_newest() is request:
                    break
            else:
                work.append(self._work(request, budget))
                budget -= work[-1].rows
        admitted = [] if preempted else self._admit(work, budget)
        self._cache.save_ahead()
        return Plan(
            tuple(work),
            preempted,
            tuple(admitted),
            tuple(self._shifter.drain()),
            self._drain_forks(),
        )

    def _budget(self) -> int:
        """The most tokens that the next step may compute."""
        alone = len(self._running) + len(self._waiting) == 1
        return self._limits.max_step_tokens * (self._limits.lone_factor if alone else 1)

    def foresee(self, plan: Plan) -> Plan | None:
        """The plan after `plan`, before that is recorded; None if it may depend on `plan`'s tokens.

        It may when some request gets no token or one that the host must pick, when another request
        may be admitted, or when the cache lacks room. Work foreseen for a request that turns out
        to have ended is skipped when it is recorded. Requests keep the blocks reserved here, even
        when the result is None.
        """
        going = [work for work in plan.work if self.runs(work.request)]
        if (self._waiting and self._seats()) or len(going) < len(self._running):
            return None
        following = []
        for work in going:
            request, known = work.request, work.start + work.count
            if not work.samples or request.params.needs_host:
                return None
            if known + 1 - request.num_prompt + request.dropped >= request.params.max_tokens:
                if self._waiting:
                    return None
                continue  # it ends with the token that it gets now
            if known + 1 >= self._limits.max_context:
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
                self._end(request, FinishReason.ERROR, now, forget=True)
                events.append(_failure(request, result.error))
                continue
            self._advance(work)
            if result is not None and samples:
                events.append(self._append(request, result, now))
        return events

    def drain_ended(self) -> list[RequestSummary]:
        """Requests that ended since the last call, however they ended."""
        ended, self._ended = self._ended, []
        return [summary for _, summary in ended]

    def check(self) -> None:
        """Raises InvariantError unless requests, limits and the cache's sequences agree."""
        if self._running.keys() & self._waiting.keys():
            raise InvariantError("a request is both running and waiting")
        encoded = {request.encoded for request in self._running.values() if request.source}
        if self._running.keys() | encoded != self._cache.sequences:
            raise InvariantError("the running requests are not those that hold blocks")
        if len(self._running) > self._limits.max_seqs:
            raise InvariantError("too many requests run")
        for request in self._running.values():
            if not 0 <= request.computed < request.context_length <= self._limits.max_context:
                raise InvariantError(f"{request.id} has counts that cannot be")
        if any(request.computed for request in self._waiting.values()):
            raise InvariantError("a waiting request has computed tokens")
        if not self._cache.parked <= self._waiting.keys() | {
            request.encoded for request in self._waiting.values() if request.source
        }:
            raise InvariantError("something is kept for a request that does not wait")
        if not self._recompute.keys() <= self._running.keys() | self._waiting.keys():
            raise InvariantError("something is remembered of a request that ended")

    def _require_possible(self, request: Request) -> None:
        tokens, context = len(request.tokens), self._limits.max_context
        if len(request.source) > context:
            raise PromptTooLong(
                f"The prompt has {len(request.source)} tokens, but the encoder's context holds "
                f"{context}; shorten the prompt.",
                "prompt",
            )
        if tokens == 0:
            raise InvalidField("The prompt has no tokens; send at least one.", "prompt")
        if tokens >= context:
            raise PromptTooLong(
                f"The prompt has {tokens} tokens, but the context holds {context}, at least one of "
                "which is for the answer; shorten the prompt.",
                "prompt",
            )
        stored = self._room_for(request)
        if stored > self._cache.capacity:
            raise InvalidField(
                f"The prompt of {request.prompt_length} tokens and its answer need room for "
                f"{stored} tokens, but the cache holds {self._cache.capacity}; shorten the prompt "
                "or lower max_tokens.",
                "max_tokens",
            )

    def _room_for(self, request: Request) -> int:
        """The most tokens it will have stored; those of an encoder rounded up to whole blocks."""
        longest = request.num_prompt + request.params.max_tokens
        size = self._cache.block_size
        # The last token is never computed, so it needs no room.
        stored = min(longest, self._limits.max_context) - 1
        return stored + -(-len(request.source) // size) * size

    def _work(self, request: Request, budget: int) -> Work:
        """Its next tokens. Those of an answer, if several are to be computed again, are as much
        work as those of several requests, so that a step computes no more of them."""
        known, of_prompt = request.context_length, request.context_prompt
        most = max(of_prompt - request.computed, 0) + self._limits.max_seqs
        return Work(request, request.computed, min(known - request.computed, budget, most))

    def _grow(self, request: Request) -> bool:
        if self._shifter.full(request):
            if not self._shifter.shorten(request):
                return False
            self._no_room = False
        known = _known(request)
        return self._cache.reserve(request.id, known, len(known)) is not None

    def _preempt_newest(self) -> Request:
        """Move the newest running request to the front of the queue.

        What it has computed is kept for it; what is lost of that will be computed again.
        """
        _, request = self._running.popitem()
        before = self._recompute.get(request.id, 0)
        self._recompute[request.id] = max(request.computed_prompt, before)
        request.preemptions += 1
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        if self._room_for(request) > self._cache.capacity:
            self._all_fit = -1  # it was admitted before blocks were lost
        self._park(request)
        self._no_room = False
        return request

    def _admit(self, work: list[Work], budget: int) -> list[Request]:
        """Admit waiting requests in order while places, tokens and blocks last.

        A source is always encoded whole, so the last request admitted may exceed the budget.
        """
        first_time = []
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_seqs:
            request = next(iter(self._waiting.values()))
            if self._no_room or self._will_fork(request) or not self._fetched(request):
                break
            if not self._open(request):
                self._no_room = True
                break
            del self._waiting[request.id]
            self._running[request.id] = request
            if request.admitted is None:
                request.admitted = self._clock()
                request.cached = request.computed
                first_time.append(request)
            work.append(self._work(request, budget))
            budget -= work[-1].rows
        return first_time

    def _open(self, request: Request) -> bool:
        """Reserve room for all its known tokens, in both encoder and decoder or in neither."""
        full = self._shifter.full(request)
        if full and request.id not in self._cache.parked:
            self._shifter.shorten_uncached(request)
            full = False
        if self._can_fork(request):
            return self._fork(request)
        reserve = self._cache.reserve
        if request.source and self._begin(reserve, request, request.encoded) is None:
            return False
        found = self._begin(reserve, request, request.id)
        if found is None:
            if request.source:
                self._cache.park(request.encoded)
            return False
        request.computed = found
        if full and not self._grow(request):
            self._park(request)
            return False
        return True

    def _park(self, request: Request) -> None:
        request.computed = 0
        for name in _sequences(request):
            self._cache.park(name)

    def _fetched(self, request: Request) -> bool:
        """Bring back what was kept of it, or what its prompt can share, a little in each step."""
        if not self._usable(request):
            for name in _sequences(request):
                self._cache.forget(name)
        if self._can_fork(request):
            return True
        fetch = self._cache.fetch
        come = all(self._begin(fetch, request, name) for name in _sequences(request))
        return come and self._usable(request)  # one may have come in the place of another

    def _usable(self, request: Request) -> bool:
        """Whether it can go on from what is kept of it.

        Not from a part, if the rest depends on what an encoder returned or on dropped tokens.
        """
        names = [name for name in _sequences(request) if name in self._cache.parked]
        whole = request.source or request.dropped or self._shifter.full(request)
        return not whole or all(map(self._cache.intact, names))

    def _begin(self, call: Callable[..., T], request: Request, name: str) -> T:
        """The cache's `reserve` or `fetch` for one of its sequences."""
        if name == request.encoded:
            return call(name, request.source, len(request.source), share=False)
        known = _known(request)
        return call(
            name,
            known,
            min(len(known), self._limits.max_context - 1),
            salt=request.salt,
            # Nothing is shared with prompt log-probabilities, which need every row of the prompt
            # computed, or with a source: a decoder's K and V depend on its encoder's output.
            share=request.params.prompt_logprobs is None and not request.source,
            own=request.context_prompt if request.num_generated else None,
        )

    def _will_fork(self, request: Request) -> bool:
        """Whether its sibling is still computing the prompt that both share."""
        sibling = self._sibling(request)
        return sibling is not None and sibling.computed_prompt < request.num_prompt - 1

    def _can_fork(self, request: Request) -> bool:
        sibling = self._sibling(request)
        return sibling is not None and not sibling.dropped and request.num_prompt > 1

    def _sibling(self, request: Request) -> Request | None:
        """None for a request that can go on from what it had computed itself."""
        if request.num_generated or request.id in self._cache.parked:
            return None
        return self._running.get(request.sibling or "")

    def _fork(self, request: Request) -> bool:
        """Share the sibling's prompt, whose last token is computed again, for its logits."""
        assert request.sibling is not None
        length, known = request.num_prompt - 1, _known(request)
        try:
            report = self._operations.apply(Fork(request.sibling, request.id, length))
        except NoRoom:
            return False
        if self._cache.reserve(request.id, known, len(known)) is None:
            self._cache.release(request.id)
            return False
        self._forks.append(report)
        request.computed = length
        return True

    def _drain_forks(self) -> tuple[OpReport, ...]:
        forks, self._forks = self._forks, []
        return tuple(forks)

    def _advance(self, work: Work) -> None:
        request = work.request
        recomputed = self._recompute.get(request.id, 0)
        before = max(request.computed_prompt, recomputed)
        request.computed = work.start + work.count
        if not request.source:
            self.computed_prompt_tokens += max(0, request.computed_prompt - before)
        elif work.encodes and not recomputed:
            self.computed_prompt_tokens += len(request.source)
        if work.encodes:  # so that its full blocks are accounted for; nobody shares them
            self._cache.commit(request.encoded, request.source, len(request.source))
        self._cache.commit(request.id, _known(request), request.computed)
        if work.start < request.num_prompt <= request.computed:
            self._no_room = False  # a waiting request with the same prompt now needs fewer blocks

    def _append(self, request: Request, result: Sampled, now: float) -> TokenEvent:
        request.tokens.append(result.token)
        first = request.first_token is None
        if first:
            request.first_token = now
        wants_prompt = first and request.params.prompt_logprobs is not None
        finish = self._finish_reason(request)
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
        if request.overflow is Overflow.REFUSE and self._shifter.full(request):
            return FinishReason.CONTEXT
        return None

    def _end(
        self, request: Request, finish: FinishReason, now: float, *, forget: bool = False
    ) -> None:
        if self._waiting.pop(request.id, None) is None:
            del self._running[request.id]
            self._release(request, forget=forget)
        for name in _sequences(request):
            self._cache.forget(name)
        self._no_room = False  # another request may be first in the queue now
        self._recompute.pop(request.id, None)
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

    def _release(self, request: Request, *, forget: bool = False) -> None:
        for name in _sequences(request):
            self._cache.release(name, forget=forget)
        self._no_room = False


def _sequences(request: Request) -> tuple[str, ...]:
    """What it stores in the cache."""
    return (request.id, request.encoded) if request.source else (request.id,)


def _known(request: Request) -> list[int]:
    """The tokens that the model sees; the request's own list while none was dropped."""
    if not request.dropped:
        return request.tokens
    return request.context(0, request.context_length)


def _failure(request: Request, error: ServeError) -> TokenEvent:
    return TokenEvent(
        request.id, None, FinishReason.ERROR, cached_tokens=request.cached, error=error
    )
