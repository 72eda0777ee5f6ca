"""Times a random sample of a decoder's passes: the whole pass, attention and positions.

For a timed pass the decoder's calls to attention and to its encodings are wrapped with a clock,
then restored; layers that run as one kernel call measure these parts themselves. Other passes
execute none of this.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import PositionalEncoding, rotates
from ropewalk.model.kernels.cpu.layers import KernelLayers, Part
from ropewalk.model.layers.decoder import Attention
from ropewalk.server.scheduling.request import PassTimes

EVERY = 16  # passes, of which one is timed, at random: answers of equal length have a rhythm


class Watch(Protocol):
    def during(self, part: str) -> AbstractContextManager[None]:
        """Time spent inside this context counts for `part`."""
        ...


class TimedDecoder:
    """Called like the decoder. On CUDA, only a timed pass is waited for, to read its events."""

    def __init__(
        self,
        decoder: nn.Module,
        device: torch.device,
        *,
        every: int = EVERY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decoder = decoder
        self._every = every
        self._draw = random.Random(0)
        self._new_watch: Callable[[], _Watch] = (
            partial(_CudaWatch, device) if device.type == "cuda" else partial(_Watch, clock)
        )
        self._attentions = [each for each in decoder.modules() if hasattr(each, "attend")]
        encodings = [each for each in decoder.modules() if isinstance(each, PositionalEncoding)]
        rotating = [each for each in decoder.modules() if isinstance(each, Attention)]
        self._positional: list[tuple[nn.Module, str]] = [
            *((each, "embed") for each in encodings),
            *((each, "rotated") for each in rotating),
        ]
        self._stacks = [each for each in decoder.modules() if isinstance(each, KernelLayers)]
        # Whether all positional work can be timed separately: neither attention does any, nor a
        # kernel that stores keys.
        self.position_apart = all(
            each.score_bias() is None and each.rotation() is None for each in encodings
        ) and not any(each.kernel_store and rotates(each.encoding) for each in rotating)
        self._times: list[PassTimes] = []

    def __call__(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        if self._draw.random() * self._every >= 1:
            logits: Tensor = self._decoder(batch, kv)
            return logits
        return self._timed(batch, kv)

    def drain(self) -> tuple[PassTimes, ...]:
        """Times of the passes that were timed since the last call."""
        times, self._times = tuple(self._times), []
        return times

    def _timed(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        watch = self._new_watch()
        with ExitStack() as seams:
            for attention in self._attentions:
                seams.enter_context(watched(attention, "attend", watch, "attention"))
            for owner, name in self._positional if self.position_apart else ():
                seams.enter_context(watched(owner, name, watch, "position"))
            inside = seams.enter_context(told_by(self._stacks))
            with watch.during("forward"):
                logits: Tensor = self._decoder(batch, kv)
        seconds = watch.seconds()
        position = seconds["position"] + float(inside[Part.TURN])
        self._times.append(
            PassTimes(
                forward=seconds["forward"],
                attention=seconds["attention"] + float(inside[Part.ATTENTION]),
                position=position if self.position_apart else None,
            )
        )
        return logits


@contextmanager
def told_by(stacks: Sequence[KernelLayers]) -> Iterator[Tensor]:
    """Seconds spent in calls of these layers, [Part]."""
    seconds = torch.zeros(len(Part), dtype=torch.float64)
    for layers in stacks:
        layers.seconds = seconds
    try:
        yield seconds
    finally:
        for layers in stacks:
            layers.seconds = None


@contextmanager
def watched(owner: object, name: str, watch: Watch, part: str) -> Iterator[None]:
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


class _Watch:
    """Adds up the seconds spent in each part."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        began = self._mark()
        yield
        self._spans.append((part, began, self._mark()))

    def seconds(self) -> dict[str, float]:
        total = {"forward": 0.0, "attention": 0.0, "position": 0.0}
        for part, began, ended in self._spans:
            total[part] += self._between(began, ended)
        return total

    def _mark(self) -> Any:
        return self._clock()

    def _between(self, began: Any, ended: Any) -> float:
        seconds: float = ended - began
        return seconds


class _CudaWatch(_Watch):
    """With CUDA events, so that the host waits only once, when all is done."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(time.perf_counter)
        self._device = device

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize(self._device)
        return super().seconds()

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, began: Any, ended: Any) -> float:
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds / 1000
