"""Which requests run in a step, from which token, and how many. No torch, no HTTP, no metrics.

There are no prefill and decode phases: a request has known and computed tokens, and in each step
the computed ones catch up with the known ones, oldest request first, within a budget. Who is
admitted next is decided by turns (server/scheduling/queue.py).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TypeVar

from ropewalk.cache.block_pool import InvariantError
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Fork, NoRoom, OpReport
from ropewalk.model.config import Pooling
from ropewalk.server.errors import (
    CacheChanged,
    FormFailed,
    InvalidField,
    PromptTooLong,
    ServeError,
)
from ropewalk.server.scheduling.context_shift import CacheOperations, ContextShifter
from ropewalk.server.scheduling.queue import Appointments, Pace, Turns, no_place, no_time
from ropewalk.server.scheduling.request import (
    ContextShift,
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
    check_length,
)

T = TypeVar("T")

ANSWERED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT)
QUICK = 4  # a prompt of up to one in so many of a step's tokens is short
PATIENT = 8  # of a step's tokens, one in so many is for prompts of those who have many places
SHRUNK = (
    "The cache is smaller because blocks that changed in memory were taken out of use, and this "
    "request no longer fits; send a shorter one, or restart the server."
)


@dataclass(slots=True)
class _Budget:
    """What is left of the tokens that one step may compute."""

    left: int
    many: set[str]  # clients and turns with many places, beside others that have few
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
        self._cache = cache
        self._operations = operations
        self._shifter = ContextShifter(operations, cache.block_size, limits.max_context, clock)
        self._limits = limits
        self._longest = min(limits.max_context - 1, cache.capacity)  # the last token is not stored
        self._clock = clock
        self._pace = Pace(2 * limits.max_seqs)
        self._appointments = Appointments(limits.max_queue)
        # Ordered dictionaries: an abort finds its request at once in a queue of any length.
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        # Of the waiting requests that never ran.
        self._turns = Turns(max(limits.max_seqs - limits.most_seqs, 1))
        # The next request, when it did not fit and since then no block was freed or became shared.
        self._no_room: str | None = None
        self._all_fit = cache.capacity  # with this capacity every waiting request fits
        self._late_from = 0.0  # when to look for requests that have waited too long
        self._recompute: dict[str, int] = {}  # preempted: prompt tokens computed once before
        self._forks: list[OpReport] = []
        self._shifts: list[ContextShift] = []
        self._ended: list[tuple[str, RequestSummary]] = []  # request ids and how they ended

    @property
    def running(self) -> Collection[Request]:
        """Oldest first; every one holds blocks."""
        return self._running.values()

    @property
    def waiting(self) -> Collection[Request]:
        """Preempted ones first, then in order of arrival; none holds blocks."""
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
        if request.overflow is not Overflow.REFUSE:
            self._shifter.require_possible(request)
        if request.id in self._running or request.id in self._waiting:
            raise ValueError(f"request id {request.id!r} is in use")
        seats, limits = self._seats(), self._limits
        if (
            len(self._waiting) >= limits.max_queue + seats
            or self._turns.count(request.client) >= limits.most_queue + seats
        ):
            now = self._clock()
            gap = self._pace.gap(now, self._ahead())
            raise no_place(limits.max_queue, self._appointments.give(now, gap))
        if not (self._running or self._waiting):
            self._pace.begin(request.arrival)
            self._appointments.forget()
        self._waiting[request.id] = request
        self._turns.add(request)

    def _ahead(self) -> list[Request]:
        return [*islice(chain(self.running, self.waiting), self._limits.max_seqs)]

    def outlook(self) -> Outlook:
        seats, limits, gap, apart = self._seats(), self._limits, None, 0.0
        if self._waiting or not seats:
            now, ahead = self._clock(), self._ahead()
            gap, apart = self._pace.measured_gap(now, ahead), self._pace.gap(now, ahead)
        return Outlook(
            seats=seats,
            idle=not (self._running or self._waiting),
            waiting=len(self._waiting),
            places=limits.max_queue,
            gap_s=gap,
            apart_s=apart,
            most_s=limits.max_queue_s,
        )

    def _seats(self) -> int:
        """Waiting requests that the next step may admit; they do not count as queued."""
        return 0 if self._no_room else self._limits.max_seqs - len(self._running)

    def _next(self, barred: Container[str] = ()) -> Request | None:
        """The next one to be admitted, without those whose client or turn is `barred`."""
        first = next(iter(self._waiting.values()), None)
        if first is not None and first.admitted is not None:  # it was preempted
            return first
        return self._turns.next(barred)

    def _may_admit(self) -> bool:
        if not self._waiting or len(self._running) >= self._limits.max_seqs:
            return False
        request = self._next(self._barred())
        return request is not None and request.id != self._no_room

    def _barred(self) -> set[str]:
        """Clients and turns that have all places but those that are kept for others."""
        most = self._limits.most_seqs
        if len(self._running) < most or most == self._limits.max_seqs:
            return set()
        return {holder for holder, count in self._holders().items() if count >= most}

    def _holders(self) -> Counter[str]:
        """How many places clients, if there are several, and turns have."""
        holders = Counter(request.turn for request in self._running.values())
        if self._limits.several_clients:
            holders.update(request.client for request in self._running.values())
        return holders

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

    def fail_all(self, error: ServeError) -> list[TokenEvent]:
        """`fail` for every request there is, those included that finished in this very step."""
        ids = [*self._running, *self._waiting, *(ended for ended, _ in self._ended)]
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
        for request in tuple(self._waiting.values()):
            if self._room_for(request) > self._cache.capacity:
                self._end(request, FinishReason.ERROR, self._clock())
                ends.append(_failure(request, CacheChanged(SHRUNK)))
        return ends

    def end_late(self) -> list[TokenEvent]:
        """End requests that wait for longer than the limit, without any of their prompts run."""
        now, limit = self._clock(), self._limits.max_queue_s
        if now < self._late_from:
            return []  # called every step, and the queue may be long
        self._late_from = now + min(limit / 16, 1.0)
        ends = []
        for request in tuple(self._waiting.values()):
            if request.admitted is not None or self._turns.begun(request):
                continue
            if now - request.arrival <= limit:
                break  # the others came later
            self._end(request, FinishReason.ABORT, now)
            after = self._appointments.give(now, self._pace.gap(now, self._ahead()))
            ends.append(_failure(request, no_time(now - request.arrival, limit, after)))
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
        self._cache.save_ahead()
        shifts, self._shifts = self._shifts, []
        forks, self._forks = self._forks, []
        return Plan(tuple(work), preempted, tuple(admitted), tuple(shifts), tuple(forks))

    def _budget(self) -> _Budget:
        """The most tokens that the next step may compute."""
        limits = self._limits
        alone = len(self._running) + len(self._waiting) == 1
        most = limits.max_step_tokens * (limits.lone_factor if alone else 1)
        few = limits.max_seqs - limits.most_seqs
        many = {holder for holder, count in self._holders().items() if count > few > 0}
        budget = _Budget(most, many, max(most // PATIENT, 1))
        if self._turns.next(many) is None and all(map(budget.limits, self._running.values())):
            budget.many = set()  # nobody else is there
        return budget

    def foresee(self, plan: Plan) -> Plan | None:
        """The plan after `plan`, before that is recorded; None if it may depend on `plan`'s tokens.

        It may when some request gets no token or one that the host must pick, when another request
        may be admitted, or when the cache lacks room. Work foreseen for a request that turns out
        to have ended is skipped when it is recorded. Requests keep the blocks reserved here, even
        when the result is None.
        """
        going = [work for work in plan.work if self.runs(work.request)]
        if self._may_admit() or len(going) < len(self._running):
            return None
        following = []
        for work in going:
            request, known = work.request, work.start + work.count
            if not work.samples or request.params.needs_host or request.pooling is not None:
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
            if result is not None and result.pooled is not None:
                request.add_pooled(work.start, result.pooled)
            if result is not None and samples:
                events += self._extend(request, result, now)
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
        never_ran = {each.id for each in self._waiting.values() if each.admitted is None}
        if never_ran != {request.id for request in self._turns}:
            raise InvariantError("those who take turns are not those who wait")

        if not self._cache.parked <= self._waiting.keys() | {
            request.encoded for request in self._waiting.values() if request.source
        }:
            raise InvariantError("something is kept for a request that does not wait")
        if not self._recompute.keys() <= self._running.keys() | self._waiting.keys():
            raise InvariantError("something is remembered of a request that ended")

    def _require_possible(self, request: Request) -> None:
        if not request.tokens:
            raise InvalidField("The prompt has no tokens; send at least one.", "prompt")
        check_length(
            len(request.tokens),
            len(request.source),
            self._limits.max_context,
            answered=request.pooling is None,
        )
        stored = self._room_for(request)
        if stored > self._cache.capacity and request.pooling is not None:
            raise PromptTooLong(
                f"The input has {stored} tokens, but the cache holds {self._cache.capacity}; "
                "shorten it.",
                "input",
            )
        if stored > self._cache.capacity:
            raise InvalidField(
                f"The prompt of {request.prompt_length} tokens and its answer need room for "
                f"{stored} tokens, but the cache holds {self._cache.capacity}; shorten the prompt "
                "or lower max_tokens.",
                "max_tokens",
            )

    def _room_for(self, request: Request) -> int:
        """The most tokens it will have stored; those of an encoder rounded up to whole blocks."""
        if request.pooling is not None:
            return request.num_prompt
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
        if self._is_full(request):
            shift = self._shifter.shorten(request)
            if shift is None:
                return False
            self._shifts.append(shift)
            self._no_room = None
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
        self._no_room = None
        return request

    def _quick(self, budget: int) -> Request | None:
        """A short prompt that does not wait until a long one of another is computed.

        Short: it takes a small part of a step. Another: a list of prompts, or another client.
        """
        if not self._waiting or self._no_room or len(self._running) >= self._limits.max_seqs:
            return None
        most = budget - len(self._running)
        for long in reversed(self._running.values()):
            if long.context_length - long.computed > most:
                break
        else:
            return None
        quick = self._next({*self._barred(), long.group or long.client})
        if quick is None or quick.admitted is not None or self._will_fork(quick):
            return None
        return quick if quick.context_length + len(quick.source) <= budget // QUICK else None

    def _admit(self, work: list[Work], budget: _Budget, quick: Request | None) -> list[Request]:
        """Admit waiting requests by turns while places, tokens and blocks last; `quick` first.

        A source is always encoded whole, so the last request admitted may exceed the budget.
        """
        first_time = []
        forking: set[str] = set()
        while self._waiting and budget.left > 0 and len(self._running) < self._limits.max_seqs:
            request = quick or self._next(forking | self._barred() | budget.barred)
            if request is None:
                break
            if self._will_fork(request):
                if request.admitted is not None or not request.group:
                    break
                forking.add(request.group)
                continue
            if self._no_room == request.id or not self._fetched(request):
                break
            if not self._open(request):
                self._no_room = request.id
                break
            quick = None
            del self._waiting[request.id]
            self._running[request.id] = request
            if request.admitted is None:
                request.admitted = self._clock()
                request.cached = request.computed
                first_time.append(request)
                self._turns.take(request)
                self._turns.charge(request.client, request.prompt_length - request.cached)
            work.append(self._work(request, budget.of(request)))
            budget.spend(work[-1])
        return first_time

    def _open(self, request: Request) -> bool:
        """Reserve room for all its known tokens, in both encoder and decoder or in neither."""
        full = self._is_full(request)
        if full and request.id not in self._cache.parked:
            self._shifts.append(self._shifter.shorten_uncached(request))
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
        whole = (
            request.source
            or request.dropped
            or self._is_full(request)
            or request.pooling is Pooling.MEAN  # `pooled` is of all that was computed
        )
        return not whole or all(map(self._cache.intact, names))

    def _begin(self, call: Callable[..., T], request: Request, name: str) -> T:
        """The cache's `reserve` or `fetch` for one of its sequences."""
        if name == request.encoded:
            return call(name, request.source, len(request.source), share=False)
        known = _known(request)
        return call(
            name,
            known,
            min(len(known), self._limits.max_context - (request.pooling is None)),
            salt=request.salt,
            # Nothing is shared with prompt log-probabilities or a mean, which need every row of the
            # prompt computed, or with a source: a decoder's K and V depend on its encoder's output.
            share=request.params.prompt_logprobs is None
            and request.pooling is not Pooling.MEAN
            and not request.source,
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
            self._no_room = None  # a waiting request with the same prompt now needs fewer blocks

    def _extend(self, request: Request, result: Sampled, now: float) -> list[TokenEvent]:
        """Add its token, and those that its grammar has follow it."""
        forced: list[int] = []
        if request.matcher is not None:
            try:
                forced = request.matcher.advance(result.token, self._most_forced(request))
            except FormFailed as error:
                self._end(request, FinishReason.ERROR, now)
                return [_failure(request, error)]
        results = [result, *map(Sampled, forced)]
        events = []
        for each in results:
            events.append(self._append(request, each, now, last=each is results[-1]))
            if events[-1].finish is not None:
                break
        self.forced_tokens += len(events) - 1
        return events

    def _most_forced(self, request: Request) -> int:
        """None where each token's scores are wanted; else less than would fill the context, where
        a token at a time is dropped or ends the answer."""
        if request.params.logprobs is not None:
            return 0
        return max(0, self._limits.max_context - request.context_length - 2)

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
        self._turns.charge(request.client, 1)
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

    def _is_full(self, request: Request) -> bool:
        """Whether the next token would be computed at a position past the context."""
        return request.pooling is None and request.context_length >= self._limits.max_context

    def _finish_reason(self, request: Request) -> FinishReason | None:
        params, generated = request.params, request.num_generated
        if generated >= params.min_tokens and request.tokens[-1] in params.stop_ids:
            return FinishReason.STOP
        if generated >= params.max_tokens:
            return FinishReason.LENGTH
        if request.overflow is Overflow.REFUSE and self._is_full(request):
            return FinishReason.CONTEXT
        return None

    def _end(
        self, request: Request, finish: FinishReason, now: float, *, forget: bool = False
    ) -> None:
        if self._waiting.pop(request.id, None) is None:
            del self._running[request.id]
            self._release(request, forget=forget)
        else:
            self._turns.remove(request)
        if request.admitted is not None:
            self._pace.end(now, request.num_generated + (request.pooling is not None))
        for name in _sequences(request):
            self._cache.forget(name)
        self._no_room = None  # another request may be first in the queue now
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
        self._no_room = None


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
