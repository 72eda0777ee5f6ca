"""How fast requests finish, and so when to come back to a queue that is full."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import floor
from statistics import fmean

from ropewalk.server.errors import MAX_RETRY_AFTER, QueueFull, QueueTime
from ropewalk.server.scheduling.request import Request

RECENT = 32  # ended requests from which the pace is taken, at least
# Who comes too late has waited; who comes too early may have no try left.
MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class _End:
    seconds: float  # since the end before it, without pauses
    tokens: int  # that it generated


# The guess for a server that has answered nothing yet; real ends soon outweigh it.
_GUESS = _End(seconds=3.2, tokens=64)


class Pace:
    """How far apart requests end. Times are monotonic seconds.

    Answers of one length end together, so the pace is that of `recent` ends, or of RECENT.
    """

    def __init__(self, recent: int = RECENT) -> None:
        self._ends = deque([_GUESS], maxlen=max(recent, RECENT))
        self._since = 0.0  # the last end, or the start of work after a pause

    def begin(self, now: float) -> None:
        """The first request after a pause has come."""
        self._since = now

    def end(self, now: float, tokens: int) -> None:
        """A request that had been admitted has ended."""
        self._ends.append(_End(now - self._since, tokens))
        self._since = now

    def gap(self, now: float, ahead: Sequence[Request]) -> float:
        """Seconds between two ends, at the pace of recent requests and of those ahead.

        ahead: running requests, or the first to run.
        """
        made = sum(request.num_generated for request in ahead)
        return self._gap(now, ahead, self._ends, made)

    def measured_gap(self, now: float, ahead: Sequence[Request]) -> float | None:
        """The same from ends alone; None until there are some."""
        ends = [end for end in self._ends if end is not _GUESS]
        return self._gap(now, ahead, ends, 0) if len(ends) >= RECENT // 2 and ahead else None

    def _gap(
        self, now: float, ahead: Sequence[Request], ends: Collection[_End], made: int
    ) -> float:
        """A request's tokens at the pace of `ends` and of `made` tokens besides.

        Many answers end before `max_tokens`, so none is expected to be more than twice as long as
        the recent ones, or as it already is.
        """
        seconds = sum(end.seconds for end in ends) + now - self._since
        ended = sum(end.tokens for end in ends)
        usual = ended / len(ends)
        expected = fmean(
            min(request.params.max_tokens, 2 * max(usual, request.num_generated))
            for request in ahead
        )
        return expected * seconds / max(ended + made, 1)


class Appointments:
    """Gives everyone who is refused a time of their own, as far apart as requests end.

    Times are monotonic seconds. Advice is in whole seconds, so those who heed it come in bunches,
    of which no more than `places` are admitted at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._last = 0.0  # the time that was given last

    def forget(self) -> None:
        """Nobody waits any more, so nobody needs to keep out of another's way."""
        self._last = 0.0

    def give(self, now: float, gap: float, after: float = 0.0) -> int:
        """Whole seconds after which there should be room for one more, and `after` at the least."""
        given = max(now + after, self._last) + max(MARGIN * gap, 1 / self._places)
        self._last = min(given, now + MAX_RETRY_AFTER - 1)
        return floor(self._last - now) + 1


def no_place(places: int, retry_after: int) -> QueueFull:
    """What one request gets where all places in the queue are taken."""
    return QueueFull(
        f"All {places} places in the queue (--max-queue) are taken; retry in {retry_after} s, or "
        "send fewer at once.",
        retry_after=retry_after,
    )


def no_time(wait: float, limit: float, retry_after: int) -> QueueTime:
    """What a request gets that waits for longer than `limit`. Seconds."""
    return QueueTime(
        f"The wait in the queue is {wait:.1f} s, longer than the limit of {limit:g} s "
        f"(--max-queue-time); retry in {retry_after} s, or send fewer at once.",
        retry_after=retry_after,
    )
