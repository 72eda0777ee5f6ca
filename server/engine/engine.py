"""One model's loop body: plan, build batch, forward, sample, record. Called from one thread.

The auditor inspects the cache before and after each write to it. Knows no asyncio, no HTTP and
no metrics: it reports what happened as events and numbers.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from logging import getLogger

import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import CacheManager
from ropewalk.server.engine.cache_view import CacheView, view
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.engine.runner import Launch, Run, Sampling
from ropewalk.server.engine.statistics import Forecast, PositionMeter, Statistics
from ropewalk.server.errors import RequestFailed, ServeError
from ropewalk.server.scheduling.request import (
    Outlook,
    PassTimes,
    Plan,
    Request,
    Sampled,
    StepStats,
    TokenEvent,
    Work,
)
from ropewalk.server.scheduling.scheduler import Scheduler

log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step to come. With `sampling` it was launched ahead, and its passes are already timed."""

    plan: Plan
    forecast: Forecast
    sampling: Sampling | None = None
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
        return self._scheduler.holds_context

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

    def step(self) -> Step:
        """One forward pass, or nothing when idle; the counts are right either way.

        Plan, build the batch, forward, sample, record. The three in the middle are the runner's.
        """
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
