"""Adds up time by part. Knows nothing of what the parts are."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
