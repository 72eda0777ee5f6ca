"""Whose turn it is to be admitted. Knows requests and tokens, but no cache, clock or limits.

Clients, told apart by their API keys, take turns so that each gets as many tokens as the others.
Those of one client are admitted by priority, then in turns: one prompt of each HTTP request that
waits. So a request of a thousand prompts delays any other by one of its prompts, and nobody waits
for ever: a turn comes round after one prompt of every request before it.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterator

from server.request import Request

# The prompts of one HTTP request that wait, oldest first, by id.
_Group = OrderedDict[str, Request]
# The HTTP requests of one priority, next one first.
_Ring = OrderedDict[str, _Group]


class Turns:
    """The requests that have never run, in the order in which they will."""

    def __init__(self) -> None:
        self._clients: dict[str, dict[int, _Ring]] = {}  # those that wait, rings by priority
        # Tokens computed for each client. Only differences count, and only of clients that wait at
        # the same time: whoever comes back begins level with who was admitted last.
        self._used: dict[str, int] = {}
        self._level = 0
        self._counts: Counter[str] = Counter()  # waiting requests of each client
        self._begun: set[str] = set()  # turns of requests of which another prompt was admitted

    def __iter__(self) -> Iterator[Request]:
        for client in self._clients:
            for _, group in self._rings(client):
                yield from group.values()

    def add(self, request: Request) -> None:
        client = request.client
        if client not in self._clients:
            if not self._clients:  # nobody has waited for what the others got
                self._level = max(self._used.values(), default=0)
            self._used[client] = max(self._used.get(client, 0), self._level)
        rings = self._clients.setdefault(client, {})
        ring = rings.setdefault(request.priority, OrderedDict())
        ring.setdefault(request.turn, OrderedDict())[request.id] = request
        self._counts[client] += 1

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        rings = self._clients.get(request.client, {})
        ring = rings.get(request.priority, OrderedDict())
        group = ring.get(request.turn, OrderedDict())
        if group.pop(request.id, None) is None:  # it ran before, and was preempted
            return
        self._counts[request.client] -= 1
        if not group:
            del ring[request.turn]
            self._begun.discard(request.turn)
        if not ring:
            del rings[request.priority]
        if not rings:
            del self._clients[request.client]

    def take(self, request: Request) -> None:
        """`request` is admitted: next in turn are the others."""
        self._level = max(self._level, self._used[request.client])
        self._clients[request.client][request.priority].move_to_end(request.turn)
        self._begun.add(request.turn)
        self.remove(request)

    def count(self, client: str) -> int:
        """How many requests of a client wait."""
        return self._counts[client]

    def begun(self, request: Request) -> bool:
        """Whether another prompt of the same HTTP request was admitted before this one."""
        return request.turn in self._begun

    def charge(self, client: str, tokens: int) -> None:
        """Tokens were computed for a client."""
        self._used[client] = self._used.get(client, 0) + tokens

    def next(self, barred: Container[str] = ()) -> Request | None:
        """Who is to be admitted next, except those whose client or `turn` is `barred`."""
        for client in sorted(self._clients, key=self._used.__getitem__):
            if client not in barred:
                for turn, group in self._rings(client):
                    if turn not in barred:
                        return next(iter(group.values()))
        return None

    def _rings(self, client: str) -> Iterator[tuple[str, _Group]]:
        rings = self._clients[client]
        for priority in sorted(rings):
            yield from rings[priority].items()
