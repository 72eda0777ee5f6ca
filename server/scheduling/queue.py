"""Who waits: whose turn is next, and how long that takes.

Knows requests and tokens, but no cache. Clients, told apart by their API keys, take turns so that
each gets as many tokens as the others. Those of one client are admitted by priority, then in turns:
some prompts of each HTTP request that waits. So a request of a thousand prompts delays any other by
a few of its prompts, and nobody waits for ever: a turn comes round after a few prompts of every
request before it.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import floor
from statistics import fmean

from ropewalk.cache.types import InvariantError
from ropewalk.server.errors import MAX_RETRY_AFTER, QueueFull, QueueTime
from ropewalk.server.scheduling.request import Limits, Outlook, Request

RECENT = 32  # ended requests from which the pace is taken, at least
# Who comes too late has waited; who comes too early may have no try left.
MARGIN = 1.5


@dataclass(slots=True)
class _Group:
    """The prompts of one HTTP request."""

    waiting: OrderedDict[str, Request] = field(default_factory=OrderedDict)  # oldest first, by id
    taken: int = 0  # prompts that were admitted


# The HTTP requests of one priority, next one first.
_Ring = OrderedDict[str, _Group]


class Turns:
    """The requests that have never run, in the order in which they will.

    A turn is `most` prompts of one HTTP request, or all that it has.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._clients: dict[str, dict[int, _Ring]] = {}  # those that wait, rings by priority
        self._counts: Counter[str] = Counter()  # waiting requests of each client
        # Tokens computed for each client. Only differences count, and only of clients that wait at
        # the same time: whoever comes back begins level with who was admitted last.
        self._used: dict[str, int] = {}
        self._level = 0

    def __iter__(self) -> Iterator[Request]:
        for client in self._clients:
            for _, group in self._groups(client):
                yield from group.waiting.values()

    def add(self, request: Request) -> None:
        client = request.client
        if client not in self._clients:
            if not self._clients:  # nobody has waited for what the others got
                self._level = max(self._used.values(), default=0)
            self._used[client] = max(self._used.get(client, 0), self._level)
        rings = self._clients.setdefault(client, {})
        ring = rings.setdefault(request.priority, OrderedDict())
        ring.setdefault(request.turn, _Group()).waiting[request.id] = request
        self._counts[client] += 1

    def remove(self, request: Request) -> None:
        """Forget a request, if it waits here: one that was preempted does not."""
        group = self._group(request)
        if group is None or group.waiting.pop(request.id, None) is None:
            return
        self._counts[request.client] -= 1
        rings = self._clients[request.client]
        if not group.waiting:
            del rings[request.priority][request.turn]
        if not rings[request.priority]:
            del rings[request.priority]
        if not rings:
            del self._clients[request.client]

    def take(self, request: Request) -> None:
        """`request` is admitted. After the last prompt of a turn, others are next."""
        self._level = max(self._level, self._used[request.client])
        ring = self._clients[request.client][request.priority]
        group = ring[request.turn]
        group.taken += 1
        if group.taken % self._most == 0:
            ring.move_to_end(request.turn)
        self.remove(request)

    def charge(self, client: str, tokens: int) -> None:
        """Tokens were computed for a client."""
        self._used[client] = self._used.get(client, 0) + tokens

    def next(self, barred: Container[str] = ()) -> Request | None:
        """Who is to be admitted next, except those whose client or `turn` is `barred`."""
        for client in sorted(self._clients, key=self._used.__getitem__):
            if client not in barred:
                for turn, group in self._groups(client):
                    if turn not in barred:
                        return next(iter(group.waiting.values()))
        return None

    def begun(self, request: Request) -> bool:
        """Whether another prompt of the same HTTP request was admitted before this one."""
        group = self._group(request)
        return group is not None and group.taken > 0

    def count(self, client: str) -> int:
        """How many requests of a client wait."""
        return self._counts[client]

    def _group(self, request: Request) -> _Group | None:
        ring = self._clients.get(request.client, {}).get(request.priority)
        return None if ring is None else ring.get(request.turn)

    def _groups(self, client: str) -> Iterator[tuple[str, _Group]]:
        rings = self._clients[client]
        for priority in sorted(rings):
            yield from rings[priority].items()


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
        self._last = self.next(now, gap, after)
        return floor(self._last - now) + 1

    def next(self, now: float, gap: float, after: float = 0.0) -> float:
        """The time that `give` would give."""
        given = max(now + after, self._last) + max(MARGIN * gap, 1 / self._places)
        return min(given, now + MAX_RETRY_AFTER - 1)


def no_place(places: int, retry_after: int, model: str | None = None) -> QueueFull:
    """What one request gets where all places in the queue are taken."""
    return QueueFull(
        f"All {places} places in the queue (--max-queue) are taken; retry in {retry_after} s, or "
        "send fewer at once.",
        retry_after=retry_after,
        model=model,
    )


def no_time(wait: float, limit: float, retry_after: int, model: str | None = None) -> QueueTime:
    """What a request gets that waits for longer than `limit`. Seconds."""
    return QueueTime(
        f"The wait in the queue is {wait:.1f} s, longer than the limit of {limit:g} s "
        f"(--max-queue-time); retry in {retry_after} s, or send fewer at once.",
        retry_after=retry_after,
        model=model,
    )


class Queue:
    """The requests that wait: preempted ones first, then by `turns` those that never ran.

    running: those that run, by id, oldest first. `no_room` is the id of the next request, when it
    did not fit and since then no block was freed or became shared.
    """

    def __init__(
        self,
        limits: Limits,
        running: Mapping[str, Request],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.no_room: str | None = None
        self._limits = limits
        self._running = running
        self._clock = clock
        # By id: preempted ones first, then in order of arrival. An abort finds its request at once.
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.turns = Turns(max(limits.max_seqs - limits.most_seqs, 1))
        self._asked: Counter[str] = Counter()  # requests, of each list and of each client
        self.pace = Pace(2 * limits.max_seqs)
        self._appointments = Appointments(limits.max_queue)
        self._late_from = 0.0  # when to look for requests that have waited too long

    def add(self, request: Request) -> None:
        """Raises QueueFull."""
        seats, limits = self._seats(), self._limits
        if (
            len(self.waiting) >= limits.max_queue + seats
            or self.turns.count(request.client) >= limits.most_queue + seats
        ):
            raise no_place(limits.max_queue, self._appointment(self._clock()))
        if not (self._running or self.waiting):
            self.pace.begin(request.arrival)
            self._appointments.forget()
        self.waiting[request.id] = request
        self.turns.add(request)
        self._asked.update(self._askers(request))

    def put_back(self, request: Request) -> None:
        """It was preempted, so it is the first to run again."""
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id, last=False)

    def admit(self, request: Request) -> None:
        """It waits no longer. For the first time: what is to be computed of its prompt is known."""
        del self.waiting[request.id]
        if request.admitted is None:
            request.admitted = self._clock()
            request.cached = request.computed
            self.turns.take(request)
            self.turns.charge(request.client, request.prompt_length - request.cached)

    def remove(self, request: Request) -> bool:
        """A request has ended; returns whether it has waited here."""
        self._asked -= Counter(self._askers(request))
        if self.waiting.pop(request.id, None) is None:
            return False
        self.turns.remove(request)
        return True

    def next(self, barred: Container[str] = ()) -> Request | None:
        """The next one to be admitted, without those whose client or turn is `barred`."""
        first = next(iter(self.waiting.values()), None)
        if first is not None and first.admitted is not None:  # it was preempted
            return first
        return self.turns.next(barred)

    def may_admit(self) -> bool:
        """Whether a request could be admitted now."""
        if not self.waiting or len(self._running) >= self._limits.max_seqs:
            return False
        request = self.next(self.barred())
        return request is not None and request.id != self.no_room

    def barred(self) -> set[str]:
        """Clients and turns that have all places but those that are kept for others."""
        most = self._limits.most_seqs
        if len(self._running) < most or most == self._limits.max_seqs:
            return set()
        return {holder for holder, count in self.holders().items() if count >= most}

    def holders(self) -> Counter[str]:
        """How many places clients, if there are several, and turns have."""
        holders = Counter(request.turn for request in self._running.values())
        if self._limits.several_clients:
            holders.update(request.client for request in self._running.values())
        return holders

    def crowds(self) -> set[str]:
        """Clients, if there are several, and lists with so many requests that, if all ran, the
        places kept for others would not hold them."""
        few = self._limits.max_seqs - self._limits.most_seqs
        return {asker for asker, count in self._asked.items() if count > few > 0}

    def _askers(self, request: Request) -> list[str]:
        asking = (request.group, request.client if self._limits.several_clients else "")
        return [asker for asker in asking if asker]

    def outlook(self) -> Outlook:
        seats, limits, gap, apart = self._seats(), self._limits, None, 0.0
        if self.waiting or not seats:
            now, ahead = self._clock(), self._ahead()
            gap, apart = self.pace.measured_gap(now, ahead), self.pace.gap(now, ahead)
        return Outlook(
            seats=seats,
            idle=not (self._running or self.waiting),
            waiting=len(self.waiting),
            places=limits.max_queue,
            gap_s=gap,
            apart_s=apart,
            most_s=limits.max_queue_s,
        )

    def late(self, now: float) -> Iterator[tuple[Request, QueueTime]]:
        """Those that wait for longer than the limit, without any of their prompts run; and why."""
        limit = self._limits.max_queue_s
        if now < self._late_from:
            return  # called every step, and the queue may be long
        self._late_from = now + min(limit / 16, 1.0)
        for request in tuple(self.waiting.values()):
            if request.admitted is not None or self.turns.begun(request):
                continue
            if now - request.arrival <= limit:
                break  # the others came later
            yield request, no_time(now - request.arrival, limit, self._appointment(now))

    def check(self) -> None:
        """Raises InvariantError unless those who wait and those who take turns agree."""
        if any(request.computed for request in self.waiting.values()):
            raise InvariantError("a waiting request has computed tokens")
        never_ran = {each.id for each in self.waiting.values() if each.admitted is None}
        if never_ran != {request.id for request in self.turns}:
            raise InvariantError("those who take turns are not those who wait")
        there = chain(self._running.values(), self.waiting.values())
        if self._asked != Counter(chain.from_iterable(map(self._askers, there))):
            raise InvariantError("requests are not counted for who asked for them")

    def _seats(self) -> int:
        """Waiting requests that the next step may admit; they do not count as queued."""
        return 0 if self.no_room else self._limits.max_seqs - len(self._running)

    def _ahead(self) -> list[Request]:
        those = chain(self._running.values(), self.waiting.values())
        return [*islice(those, self._limits.max_seqs)]

    def _appointment(self, now: float) -> int:
        return self._appointments.give(now, self.pace.gap(now, self._ahead()))
