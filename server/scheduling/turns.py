"""Whose turn it is to be admitted. Knows requests and tokens, but no cache, clock or limits.

Clients, told apart by their API keys, take turns so that each gets as many tokens as the others.
Those of one client are admitted by priority, then in turns: some prompts of each HTTP request that
waits. So a request of a thousand prompts delays any other by a few of its prompts, and nobody waits
for ever: a turn comes round after a few prompts of every request before it.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from ropewalk.server.scheduling.request import Request


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
