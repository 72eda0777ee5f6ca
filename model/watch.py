"""Times the parts of a pass. Executors say what they have just done; this knows when that was."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ropewalk.model.program import Part


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one pass, and of those the ones of each Part."""

    whole: float
    parts: Sequence[float]


class Watch:
    """Of one pass, from now on, on the host's clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        # float64 [Part]: kernels that time their own parts add to them directly.
        self.seconds = torch.zeros(len(Part), dtype=torch.float64)
        self._clock = clock
        self._began = self._before = clock()

    def spent(self, part: Part) -> None:
        """Attribute the time since the last call, or since the watch was made, to this part."""
        before = self._before
        self.skip()
        self.seconds[part] += self._before - before

    def skip(self) -> None:
        """Attribute that time to no part."""
        self._before = self._clock()

    def read(self) -> Times:
        return Times(self._clock() - self._began, self.seconds.tolist())


class CudaWatch(Watch):
    """By events on the device, which is waited for once, when the watch is read."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(lambda: 0.0)
        self._device = device
        self._first = self._last = self._event()
        self._spans: list[tuple[Part, Any, Any]] = []

    def spent(self, part: Part) -> None:
        before, self._last = self._last, self._event()
        self._spans.append((part, before, self._last))

    def skip(self) -> None:
        self._last = self._event()

    def read(self) -> Times:
        end = self._event()
        torch.cuda.synchronize(self._device)
        for part, before, after in self._spans:
            self.seconds[part] += before.elapsed_time(after) / 1000
        return Times(self._first.elapsed_time(end) / 1000, self.seconds.tolist())

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
