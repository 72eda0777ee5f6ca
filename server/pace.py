"""How fast requests finish, and so when to come back to a queue that is full."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from statistics import fmean

from server.request import MAX_RETRY_AFTER, Request

RECENT = 32  # ended requests from which the pace is taken
# Who comes too late has waited; who comes too early may have no try left.
MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class _End:
    seconds: float  # since the end before it, without pauses
    tokens: int  # that it generated


# The guess for a server that has answered nothing yet; real ends soon outweigh it.
_GUESS = _End(seconds=3.2, tokens=64)


class Pace:
    """Gives everyone who finds the queue full a time of their own, as far apart as requests end.

    Times are monotonic seconds. Advice is in whole seconds, so those who heed it come in bunches,
    of which no more than `places` are admitted at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._ends = deque([_GUESS], maxlen=RECENT)
        self._since = 0.0  # the last end, or the start of work after a pause
        self._promised = 0.0  # the time that was given last

    def begin(self, now: float) -> None:
        """The first request after a pause has come."""
        self._since = now

    def end(self, now: float, tokens: int) -> None:
        """A request that had been admitted has ended."""
        self._ends.append(_End(now - self._since, tokens))
        self._since = now

    def retry_after(self, now: float, ahead: Sequence[Request]) -> int:
        """Whole seconds after which there should be room for one more.

        ahead: running requests, or the first to run.
        """
        gap = max(MARGIN * self._seconds_each(now, ahead), 1 / self._places)
        promised = max(now, self._promised) + gap
        self._promised = min(promised, now + MAX_RETRY_AFTER - 1)
        return floor(self._promised - now) + 1

    def _seconds_each(self, now: float, ahead: Sequence[Request]) -> float:
        """Between two ends: a request's tokens at the pace of the recent ones and of those ahead.

        Many answers end before `max_tokens`, so none is expected to be more than twice as long as
        the recent ones, or as it already is.
        """
        made = sum(request.num_generated for request in ahead)
        seconds = sum(end.seconds for end in self._ends) + now - self._since
        tokens = sum(end.tokens for end in self._ends) + made
        usual = fmean(end.tokens for end in self._ends)
        expected = fmean(
            min(request.params.max_tokens, 2 * max(usual, request.num_generated))
            for request in ahead
        )
        return expected * seconds / max(tokens, 1)
