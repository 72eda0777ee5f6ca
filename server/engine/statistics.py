"""What a step did, in numbers: counts, times, and the work that positions cost.

Times are those of a random sample of a decoder's passes, whose executor tells a watch what it
spends time on. Other passes look at no clock.

The work is calculated from the context length of each token. An encoding gives the cost of one
token that sees n keys. A chunk of a prompt covers a range of n, so prefix sums of the costs are
kept, and a chunk's cost is the difference of two of them.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add, sub

from torch import Tensor

from ropewalk.cache.keeper import Moves
from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import OpReport
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.decoder import Decoder
from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork
from ropewalk.model.program import Part
from ropewalk.model.watch import CudaWatch, Watch
from ropewalk.server.engine.integrity import AuditCounts
from ropewalk.server.scheduling.request import PassTimes, Phase, Plan, StepStats, TokenEvent, Work
from ropewalk.server.scheduling.scheduler import Scheduler

Cost = Callable[[int], PositionalWork]  # of one token that sees so many keys
Sum = tuple[int, ...]  # the values of PositionalWork

EVERY = 16  # passes, of which one is timed, at random: answers of equal length have a rhythm
_TOGETHER = 64  # sums to add at a time: adding them step by step takes far longer


def no_cost(context: int) -> PositionalWork:
    """Where there is no encoding, or none that is known."""
    return NO_WORK


class PositionMeter:
    """`cost` is that of a decoder's token, `source_cost` that of an encoder's.

    With `trained_context` None no token counts as extrapolated.
    """

    def __init__(
        self,
        cost: Cost = no_cost,
        source_cost: Cost = no_cost,
        trained_context: int | None = None,
    ) -> None:
        self._cost = cost
        self._source_cost = source_cost
        self._trained_context = trained_context
        self._sums = [NO_WORK.values]  # [n]: of contexts 1 to n

    def measure(self, plan: Sequence[Work]) -> tuple[PositionalWork, PositionalWork]:
        """The work of prefill and of decode. Call before the plan is recorded.

        Prefill is all that is computed for a request before its first token; computing it again
        after a preemption later counts as decode.
        """
        spent = [NO_WORK, NO_WORK]
        for phase in (False, True):
            own = [work for work in plan if work.decodes is phase]
            if own:
                spent[phase] = self._spent(own)
        prefill, decode = spent
        return prefill, decode

    def _spent(self, plan: Sequence[Work]) -> PositionalWork:
        before = map(sum, zip(*(self._upto(work.start) for work in plan), strict=True))
        after = map(sum, zip(*(self._upto(work.start + work.width) for work in plan), strict=True))
        spent = PositionalWork(*map(sub, after, before))
        for work in plan:
            if work.encodes:
                length = len(work.request.source)
                # Each of its tokens sees all of them.
                spent += self._source_cost(length) * length
        return spent

    def extrapolated(self, recorded: Iterable[Work], generated: Mapping[str, int]) -> int:
        """How many of the tokens `generated`, by request, are past the trained context."""
        most = self._trained_context
        if most is None:
            return 0
        return sum(
            max(0, min(generated[work.request.id], work.request.context_length - most))
            for work in recorded
        )

    def _upto(self, context: int) -> Sum:
        """The summed cost of tokens that see 1, 2, ... `context` keys."""
        if len(self._sums) <= context:
            while len(self._sums) < context + _TOGETHER:
                cost = self._cost(len(self._sums)).values
                self._sums.append(tuple(map(add, self._sums[-1], cost)))
        return self._sums[context]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What has to be measured of a plan before it is recorded."""

    spent: tuple[PositionalWork, PositionalWork]
    phase: Phase | None
    decode_context: int | None


class Statistics:
    """Stands around the steps of one engine: `begin`, `forecast` for its plan, then `end`."""

    def __init__(
        self,
        kv: KVCache,
        manager: CacheManager,
        scheduler: Scheduler,
        meter: PositionMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._manager = manager
        self._scheduler = scheduler
        self._meter = meter
        self._clock = clock
        self._began = 0.0
        self._before = (0, 0, 0, 0)
        self._last_token: dict[str, float] = {}
        self._flushed = 0  # blocks, since the last step
        self._kept: list[OpReport] = []  # operations on kept sequences, since then
        self._moves = Moves()  # counted so far

    def flushed(self, blocks: int) -> None:
        self._flushed += blocks

    def operated(self, report: OpReport) -> None:
        """Something was done to a kept sequence."""
        self._kept.append(report)

    def forget(self, request_id: str) -> None:
        """The request gets no more tokens."""
        self._last_token.pop(request_id, None)

    def begin(self) -> None:
        self._began, self._before = self._clock(), self._totals()

    def forecast(self, plan: Plan) -> Forecast:
        """Call before the plan is recorded: then a request that gets its first token `decodes`."""
        spent = self._meter.measure(plan.work)
        return Forecast(spent, _phase(plan.work), _decode_context(plan.work))

    def end(
        self,
        plan: Plan,
        forecast: Forecast,
        events: Sequence[TokenEvent],
        audit: AuditCounts,
        timed: tuple[PassTimes, ...],
    ) -> StepStats:
        computed, evicted, forced, accepted = self._totals()
        gaps = self._gaps(events)
        written = sum(work.rows for work in plan.work)
        generated = Counter(event.request_id for event in events if event.token is not None)
        flushed, self._flushed = self._flushed, 0
        kept, self._kept = tuple(self._kept), []
        spill = self._manager.spilled()
        moves, self._moves = spill.moves - self._moves, spill.moves
        return StepStats(
            seconds=self._clock() - self._began,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            batch_requests=len(plan.work),
            computed_prompt_tokens=computed - self._before[0],
            cached_prompt_tokens=sum(request.cached for request in plan.admitted),
            generated_tokens=sum(event.token is not None for event in events),
            forced_tokens=forced - self._before[2],
            draft_tokens=sum(len(work.drafts) for work in plan.work),
            accepted_draft_tokens=accepted - self._before[3],
            written_entries=written * self._kv.entries_per_token,
            written_bytes=written * self._kv.bytes_per_token,
            preemptions=plan.preempted,
            prefix_queried_tokens=sum(
                request.num_prompt for request in plan.admitted if not request.source
            ),
            evicted_blocks=evicted - self._before[1],
            flushed_blocks=flushed,
            spill=replace(spill, moves=moves),
            blocks=self._manager.counts(),
            sealed_blocks=audit.blocks.sealed,
            verified_blocks=audit.blocks.verified,
            mutated_entries=audit.blocks.mutated,
            verified_weights=audit.verified_weights,
            changed_weights=audit.changed_weights,
            shifts=plan.shifts,
            forks=plan.forks,
            kept=kept,
            prefill_work=forecast.spent[0],
            decode_work=forecast.spent[1],
            phase=forecast.phase,
            decode_context=forecast.decode_context,
            timed=timed,
            extrapolated_tokens=self._meter.extrapolated(plan.work, generated),
            inter_token_seconds=gaps,
            outlook=self._scheduler.outlook(),
            ended=tuple(self._scheduler.drain_ended()),
        )

    def _totals(self) -> tuple[int, int, int, int]:
        scheduler = self._scheduler
        return (
            scheduler.computed_prompt_tokens,
            self._manager.evicted_blocks,
            scheduler.forced_tokens,
            scheduler.accepted_draft_tokens,
        )

    def _gaps(self, events: Sequence[TokenEvent]) -> tuple[float, ...]:
        """Seconds since the previous token of each request that got one now."""
        now = self._clock()
        gaps = []
        for event in events:
            last = self._last_token.pop(event.request_id, None)
            if last is not None and event.token is not None:
                gaps.append(now - last)
            if event.finish is None:
                self._last_token[event.request_id] = now
        return tuple(gaps)


def _phase(plan: tuple[Work, ...]) -> Phase | None:
    found = {work.decodes for work in plan}
    if len(found) == 2:
        return Phase.MIXED
    return {True: Phase.DECODE, False: Phase.PREFILL}[found.pop()] if found else None


def _decode_context(plan: tuple[Work, ...]) -> int | None:
    """The longest context when every request decodes one token; None otherwise."""
    if _phase(plan) is not Phase.DECODE or any(work.width > 1 for work in plan):
        return None
    return max(work.start + work.count for work in plan)


class TimedDecoder:
    """Called like the decoder. On CUDA, only a timed pass is waited for, to read its events."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        every: int = EVERY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decoder = decoder
        self._every = every
        self._draw = random.Random(0)
        self._new_watch: Callable[[], Watch] = (
            partial(CudaWatch, decoder.device)
            if decoder.device.type == "cuda"
            else partial(Watch, clock)
        )
        self._position_apart = decoder.position_apart
        self._times: list[PassTimes] = []

    def __call__(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        if self._draw.random() * self._every >= 1:
            return self._decoder(batch, kv)
        watch = self._new_watch()
        logits = self._decoder(batch, kv, watch)
        times = watch.read()
        self._times.append(
            PassTimes(
                forward=times.whole,
                attention=times.parts[Part.ATTENTION],
                position=times.parts[Part.POSITION] if self._position_apart else None,
            )
        )
        return logits

    def drain(self) -> tuple[PassTimes, ...]:
        """Times of the passes that were timed since the last call."""
        times, self._times = tuple(self._times), []
        return times
