"""How fast a queue moves, and when to come back to one that is full. Knows no request."""

from collections import deque
from math import floor
from statistics import fmean

from server.request import MAX_RETRY_AFTER

RECENT = 32  # requests whose pace is taken for that of the next
FIRST_GUESS_S = 4.0  # for one request, while none has ended


class Pace:
    """Gives everyone who finds the queue full a time of their own, one request's pace apart.

    Times are monotonic seconds. Advice is in whole seconds, so those who heed it come in bunches,
    of which no more than `places` are admitted at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._gaps: deque[float] = deque(maxlen=RECENT)
        self._since = 0.0  # the last end, or the start of work after a pause
        self._promised = 0.0  # the time that was given last

    def begin(self, now: float) -> None:
        """The first request after a pause has come."""
        self._since = now

    def end(self, now: float) -> None:
        """A request has ended."""
        self._gaps.append(now - self._since)
        self._since = now

    def retry_after(self, now: float) -> int:
        """Whole seconds, at least 1, after which there should be room for one more."""
        gap = fmean(self._gaps) if self._gaps else FIRST_GUESS_S
        waited = now - self._since
        if waited > gap:  # what takes longer than usual is likely to take as long again
            gap = 2 * waited
        promised = max(now, self._promised) + max(gap, 1 / self._places)
        self._promised = min(promised, now + MAX_RETRY_AFTER - 1)
        return floor(self._promised - now) + 1
