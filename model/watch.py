"""Times the parts of a pass. Executors say what they have just done; this knows when that was."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.model.program import Part

Clock = Callable[[], float]


class Watch:
    """Of one pass, from now on, on the host's clock.

    seconds: float64 [Part]; kernels that time their own parts add to them directly.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.seconds = torch.zeros(len(Part), dtype=torch.float64)
        self._clock = clock
        self._before = clock()

    def spent(self, part: Part) -> None:
        """Attribute the time since the last call, or since the watch was made, to this part."""
        self.seconds[part] += self.skip()

    def skip(self) -> float:
        """Attribute that time to no part. Returns it."""
        before, self._before = self._before, self._clock()
        return self._before - before

    def total(self) -> Tensor:
        """Seconds by part, [Part]."""
        return self.seconds


class CudaWatch(Watch):
    """By events on the device, which is waited for once, when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[Part | None, Any]] = []
        super().__init__(lambda: 0.0)
        self._mark(None)

    def spent(self, part: Part) -> None:
        self._mark(part)

    def total(self) -> Tensor:
        torch.cuda.synchronize(self._device)
        before: Any = None
        for part, event in self._events:
            if part is not None:
                self.seconds[part] += before.elapsed_time(event) / 1000
            before = event
        return self.seconds

    def _mark(self, part: Part | None) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append((part, event))
