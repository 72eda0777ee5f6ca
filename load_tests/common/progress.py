"""A progress line: rewritten in place on a terminal, elsewhere printed once per run."""

import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """A line on `out` (standard error, so that the tables can be piped)."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._live = out.isatty()
        self._title = ""
        self._begun = 0.0
        self._tokens = 0
        self._schedule_begun = 0.0
        self._runs = 0
        self._finished = 0

    def schedule(self, runs: int) -> None:
        """`runs` runs are ahead; the time left is estimated from those that are finished."""
        self._schedule_begun = self._clock()
        self._runs, self._finished = runs, 0

    def start(self, title: str) -> None:
        self._title = title
        self._begun = self._clock()
        self._tokens = 0
        if self._live:
            self._show(f"{title} …{self._time_left()}")
        else:
            self._out.write(f"{title}{self._time_left()}\n")
            self._out.flush()

    def note(self, text: str) -> None:
        """Progress outside of runs; shown only on a terminal, because it comes too often."""
        if self._live:
            self._show(text)

    def answered(self, count: int, total: int, output_tokens: int) -> None:
        """`count` of `total` requests are answered, the latest with `output_tokens`."""
        self._tokens += output_tokens
        if self._live:
            seconds = max(self._clock() - self._begun, 1e-9)
            speed = f"{self._tokens / seconds:.0f} tok/s"
            self._show(f"{self._title}: {count}/{total}, {speed}{self._time_left()}")

    def finish(self) -> None:
        """A run of the schedule is over."""
        self._finished += 1

    def clear(self) -> None:
        if self._live:
            self._show("")

    def _time_left(self) -> str:
        if not self._finished:
            return ""
        elapsed = self._clock() - self._schedule_begun
        seconds = elapsed / self._finished * (self._runs - self._finished)
        return f", {_duration(seconds)} left"

    def _show(self, text: str) -> None:
        self._out.write(f"\r\x1b[2K{text}")  # erases the line first
        self._out.flush()


def _duration(seconds: float) -> str:
    """In seconds below a minute, in minutes above."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
