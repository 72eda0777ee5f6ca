"""Times the parts of an engine's step; what is left is a part, too."""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.load_tests.micro.engines import decoding
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.program import Part
from ropewalk.model.watch import Watch
from ropewalk.server.engine.assemble import Wired
from ropewalk.server.metrics.exporter import Metrics

T = TypeVar("T")

LINEAR, HEAD, ATTENTION, POSITION = "linear layers", "head", "attention", "position"
NORM, ACTIVATION, STORE, RESIDUAL = "norm", "activation", "keys and values stored", "residual"
EMBEDDING, DECODER = "embedding", "rest of the decoder"
SAMPLING, SCHEDULER, BATCH = "sampling", "scheduler", "batch building"
AUDIT, METRICS, REST = "audit", "metrics", "rest"
PARTS = (
    *(LINEAR, HEAD, ATTENTION, POSITION, NORM, ACTIVATION, STORE, RESIDUAL),
    *(EMBEDDING, DECODER, SAMPLING, SCHEDULER, BATCH, AUDIT, METRICS, REST),
)

_TOLD: Mapping[Part, str] = {
    Part.EMBEDDING: EMBEDDING,
    Part.POSITION: POSITION,
    Part.NORM: NORM,
    Part.LINEAR: LINEAR,
    Part.ACTIVATION: ACTIVATION,
    Part.STORE: STORE,
    Part.ATTENTION: ATTENTION,
    Part.RESIDUAL: RESIDUAL,
    Part.HEAD: HEAD,
}
NAME = "profiled"
_WARM = 4  # steps before any is timed


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step by those of PARTS that it has; and of a step that is not watched."""

    parts: Mapping[str, float]
    unwatched: float

    @property
    def step(self) -> float:
        return sum(self.parts.values())


def metrics_for(kv: KVCache) -> Metrics:
    """The server's metrics, with the model NAME."""
    metrics = Metrics()
    per_token = kv.bytes_per_token
    metrics.add_model(
        NAME, "", {}, bytes_per_token=per_token, blocks=kv.blocks, block_size=kv.block_size
    )
    return metrics


def step_times(
    decoder: Decoder,
    requests: int,
    context: int,
    steps: int,
    *,
    kernels: Kernels | str,
    clock: Callable[[], float] | None = None,
) -> StepTimes:
    """Means over the faster half of `steps` watched steps, and of as many unwatched ones.

    Watched and unwatched steps are mixed at random. Every step gives each of `requests` its next
    token, set up as by `decoding`. `kernels` are the CPU's, for what is outside the decoder, or why
    there are none.
    """
    clock = clock or partial(_clock, decoder.device)
    stopwatch = Stopwatch(clock)
    watching = True

    def forward(batch: ForwardBatch, kv: KVCache) -> Tensor:
        with stopwatch.during(DECODER):
            watch = Watch(clock) if watching else None
            logits = decoder(batch, kv, watch)
        if watch is not None:
            for part, seconds in zip(Part, watch.seconds.tolist(), strict=True):
                if seconds:
                    stopwatch.move(seconds, DECODER, _TOLD[part])
        return logits

    made = decoding(
        decoder,
        requests,
        context,
        _WARM + 2 * steps,
        kernels=kernels,
        forward=forward,
    )
    observe = stopwatch.during(METRICS)(metrics_for(made.kv).observe_step)
    draw = random.Random(0)
    taken: list[dict[str, float]] = []
    unwatched: list[float] = []
    for watching in [True] * _WARM + draw.sample([True, False], 2 * steps, counts=[steps, steps]):
        stopwatch.drain()
        began = clock()
        with ExitStack() as seams:
            for owner, name, part in _of_engine(made) if watching else ():
                seams.enter_context(watched(owner, name, stopwatch, part))
            with stopwatch.during(REST):
                observe(NAME, made.engine.step().stats)
        if watching:
            taken.append(stopwatch.drain())
        else:
            unwatched.append(clock() - began)
    faster = _faster_half(taken[_WARM:], lambda each: sum(each.values()))
    return StepTimes(
        {part: fmean(each[part] for each in faster) for part in PARTS if part in faster[0]},
        fmean(_faster_half(unwatched, float)),
    )


def needed_context(context: int, steps: int) -> int:
    """The greatest length that a request reaches."""
    return context + _WARM + 2 * steps + 1


def _of_engine(made: Wired) -> Iterator[tuple[object, str, str]]:
    """Owner and name of each watched method, and its part."""
    yield made.runner, "build", BATCH
    yield made.runner, "sample", SAMPLING
    yield made.scheduler, "plan", SCHEDULER
    yield made.scheduler, "record", SCHEDULER
    yield made.auditor, "look", AUDIT
    yield made.auditor, "sample", AUDIT
    yield made.meter, "measure", METRICS


def _clock(device: torch.device) -> float:
    """Waits for a GPU at every reading: its work would otherwise count for later parts."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _faster_half(values: Sequence[T], seconds: Callable[[T], float]) -> Sequence[T]:
    """Drops the slower half, which holds the values that other programs disturbed."""
    return sorted(values, key=seconds)[: max(len(values) // 2, 1)]


class Stopwatch:
    """Seconds by part. A part within another one interrupts it, so no second counts twice."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []  # the innermost last
        self._since = 0.0  # what passed before has been counted

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Time spent inside this context counts for `part`."""
        self._count()
        self._open.append(part)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count `seconds` of `source` as `target` instead."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def drain(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def _count(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def watched(owner: object, name: str, watch: Stopwatch, part: str) -> Iterator[None]:
    """Time the calls of `owner.name`, then restore it as it was: own attribute or inherited."""
    act = getattr(owner, name)
    own = name in vars(owner)

    def watching(*arguments: Any, **named: Any) -> Any:
        with watch.during(part):
            return act(*arguments, **named)

    setattr(owner, name, watching)
    try:
        yield
    finally:
        delattr(owner, name)
        if own:
            setattr(owner, name, act)
