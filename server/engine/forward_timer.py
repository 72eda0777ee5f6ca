"""Times a random sample of a decoder's passes: the whole pass, attention and positions.

The executor tells a watch what it spends time on. Other passes look at no clock.
"""

import random
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.decoder import Decoder
from ropewalk.model.program import Part
from ropewalk.model.watch import CudaWatch, Watch
from ropewalk.server.scheduling.request import PassTimes

EVERY = 16  # passes, of which one is timed, at random: answers of equal length have a rhythm


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
