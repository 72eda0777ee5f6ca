"""The door: which connections are accepted, and which of the requests that they bring.

A request that would wait too long is refused from counters alone, before its body is read: that
costs so little that a server with far too many clients still spends its time on those that it
admitted. While all are refused, it is done from the bytes of a new connection, since to read each
as HTTP and send it through the application costs several times what a refusal needs. Only requests
of the plainest kind, which have arrived whole and can be read in one way, are refused like that,
and their connections closed. All others take the usual way, at the end of which the same door
refuses them. The scheduler has limits of its own for what the door cannot know, such as how many
prompts a body holds.

Connections are never more than there are file descriptors for. asyncio's own server accepts what it
can and fails, loudly and over and over, when descriptors run out. Here the longest idle connections
are closed to make room, and where none is idle, new ones wait in the system's queue.
"""

import asyncio
import logging
import re
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from math import inf
from typing import Any, Protocol

from starlette.types import Scope

from ropewalk.server.errors import QueueFull, ServeError
from ropewalk.server.http.access_log import Exchange, HttpLog, choose_id
from ropewalk.server.http.streaming import Drain
from ropewalk.server.scheduling.queue import Appointments, no_place, no_time
from ropewalk.server.scheduling.request import Outlook

# Estimates err. Who is admitted and then waits too long has cost more than a refusal at the door.
SURE = 0.6
# Of any machine: each takes some 20 KB, and limits of a million descriptors are common.
MOST_CONNECTIONS = 8192
# Descriptors kept for everything else: files, pipes to children, the engine.
RESERVED = 128
ROOM_SECONDS = 0.05  # between looks for room
BURST = 64  # connections that are accepted before others have their turn
LOG_SECONDS = 1.0
# While requests are refused, new connections wait so long for one another, and for their requests.
SHED_SECONDS = 0.05
MOST_PEEKED = 64 << 10  # bytes of a request that may be refused at once
# One in so many is closed at a time, so that the search for the longest idle ones is rare.
_SHARE = 32

_MAX_HEAD = 4 << 10
_HEAD = re.compile(
    rb"POST (/v1/(?:completions|chat/completions|responses|messages)) HTTP/1\.1\r\n"
    rb"((?:[a-z0-9-]+:[ \t]*[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\r\n)+)\r\n",
    re.IGNORECASE,
)
# They say how the body is framed, or ask for more than an answer.
_SPECIAL = frozenset((b"transfer-encoding", b"trailer", b"expect", b"upgrade", b"origin"))

log = logging.getLogger("ropewalk.http")


class Visit:
    """One HTTP request for answers, which waits until `begin`."""

    def __init__(self, door: "Door", client: str, model: str | None) -> None:
        self.client = client
        self.model = model
        self._door = door
        self._waits = True
        door.count(self, 1)

    def choose(self, model: str) -> None:
        """The body names the model. Raises QueueFull."""
        if self.model is None:
            refusal = self._door.refusal_of(model, self.client)
            if refusal is not None:
                raise refusal
            self._door.count(self, -1)
            self.model = model
            self._door.count(self, 1)

    def begin(self) -> None:
        """It waits no longer: it has its first token, or has ended. Repeating this is harmless."""
        if self._waits:
            self._waits = False
            self._door.count(self, -1)


class Door:
    """Counts the HTTP requests that wait, by model and client."""

    def __init__(
        self,
        models: Iterable[str],
        outlook: Callable[[str], Outlook],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`outlook` is each model's, of the engine."""
        self.refuses = False  # as it did with the last one who asked
        self._models = tuple(models)
        self._outlook = outlook
        self._clock = clock
        self._waiting: dict[str | None, Counter[str]] = {
            model: Counter() for model in (None, *self._models)
        }
        self._appointments = {model: Appointments(outlook(model).places) for model in self._models}

    def enter(self, client: str) -> Visit:
        """Raises QueueFull when no model would admit another request of this client in time."""
        refusal = self.refusal(client)
        if refusal is not None:
            raise refusal
        return Visit(self, client, self._models[0] if len(self._models) == 1 else None)

    def refusal(self, client: str) -> QueueFull | None:
        """Why another request of this client would not be let in, whatever its model."""
        late = {}
        for model in self._models:
            late[model] = self._late(model, client)
            if late[model] <= 0:
                self.refuses = False
                return None
        self.refuses = True
        # Only by the model that has room first: each appointment moves the next one's.
        soonest = min(late, key=lambda model: self._room_at(model, late[model]))
        return self._refused(soonest, late[soonest])

    def count(self, visit: Visit, change: int) -> None:
        waiting = self._waiting[visit.model]
        waiting[visit.client] += change
        if not waiting[visit.client]:
            del waiting[visit.client]

    def refusal_of(self, model: str, client: str) -> QueueFull | None:
        late = self._late(model, client)
        return None if late <= 0 else self._refused(model, late)

    def _refused(self, model: str, late: float) -> QueueFull:
        outlook = self._outlook(model)
        appointments, now = self._appointments[model], self._clock()
        if late == inf:
            return no_place(outlook.places, appointments.give(now, outlook.apart_s), model)
        wait, after = late + outlook.most_s * SURE, appointments.give(now, outlook.apart_s, late)
        return no_time(wait, outlook.most_s, after, model)

    def _room_at(self, model: str, late: float) -> float:
        """When who is refused now should come again."""
        gap, after = self._outlook(model).apart_s, 0.0 if late == inf else late
        return self._appointments[model].next(self._clock(), gap, after)

    def _late(self, model: str, client: str) -> float:
        """Seconds that another request would wait too long; infinite if all places are taken."""
        outlook, waiting = self._outlook(model), self._waiting[model]
        if outlook.idle and not waiting:
            self._appointments[model].forget()
        if max(outlook.waiting, waiting.total()) >= outlook.places + outlook.seats:
            return inf
        return outlook.wait(_ahead(client, waiting)) - outlook.most_s * SURE


def _ahead(client: str, waiting: Counter[str]) -> int:
    """How many requests have their turn before another one of `client`."""
    own = waiting[client]
    return own + sum(min(count, own + 1) for each, count in waiting.items() if each != client)


class Shedder:
    """Answers a whole request, given as bytes, if the door refuses it. For one event loop."""

    def __init__(
        self, door: Door, drain: Drain, identify: Callable[[Scope], str], log: HttpLog
    ) -> None:
        """`identify` returns the client of a request with these headers, or raises ServeError."""
        self._door = door
        self._drain = drain
        self._identify = identify
        self._log = log
        self._let_pass: list[Visit] = []

    @property
    def active(self) -> bool:
        """Whether the last one who asked was refused, for want of room alone."""
        return self._door.refuses and not self._drain.draining

    def answer(self, data: bytes, address: str) -> bytes | None:
        """The answer to send before the connection is closed; None: it is to be read as usual.

        Whom the door would let in counts for those that are asked about next, until `hand_over`.
        """
        began = time.perf_counter()
        read = _read(data)
        if read is None:
            return None
        path, headers = read
        try:
            client = self._identify({"headers": list(headers.items())})
        except ServeError:
            return None
        try:
            self._let_pass.append(self._door.enter(client))
            return None
        except QueueFull as refusal:
            error = refusal
        body = error.body(path)
        request_id = choose_id(headers.get(b"x-request-id"))
        seconds = time.perf_counter() - began
        status = error.status
        self._log.refused(
            Exchange(request_id, address, "POST", path, path, status, seconds, len(body)), error
        )
        lines = [
            b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()),
            b"date: " + formatdate(usegmt=True).encode(),
            *(b"%s: %s" % header for header in error.headers(len(body))),
            b"x-request-id: " + request_id.encode(),
            b"connection: close",
        ]
        return b"\r\n".join([*lines, b"", body])

    def hand_over(self) -> None:
        """Those that were let pass come to the door by the usual way, and are counted there."""
        for visit in self._let_pass:
            visit.begin()
        self._let_pass.clear()


def _read(data: bytes) -> tuple[str, dict[bytes, bytes]] | None:
    """Path and headers of a plain request that `data` is, wholly and alone."""
    end = data.find(b"\r\n\r\n", 0, _MAX_HEAD)
    found = _HEAD.fullmatch(data, 0, end + 4) if end > 0 else None
    if found is None:
        return None
    lines = [line.partition(b":") for line in found[2].split(b"\r\n")[:-1]]
    headers = {name.lower(): value.strip() for name, _, value in lines}
    if len(headers) < len(lines) or b"host" not in headers or headers.keys() & _SPECIAL:
        return None
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or len(length) > 9 or int(length) != len(data) - end - 4:
        return None
    return found[1].decode(), headers


class Connection(Protocol):
    """A connection as far as it matters whether it may be closed."""

    @property
    def idle_since(self) -> float | None:
        """The loop's time since when nothing is asked of it; None while something is."""
        ...

    @property
    def transport(self) -> asyncio.Transport: ...


def max_connections() -> int:
    """How many connections may be open; raises the process's limit of descriptors for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_CONNECTIONS
    raised = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # macOS allows less than it says
        raised = soft
    return raised - min(RESERVED, raised // 2)


class Acceptor:
    """Hands each connection that a listening socket has for us to a new protocol.

    connections: those that are open; the protocols add and remove themselves.
    """

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        connections: Set[Connection],
        limit: int,
        *,
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float,
        shedder: Shedder | None = None,
    ) -> None:
        """`shedder` is asked what new connections want, before they cost more than a refusal."""
        self._protocol = protocol
        self._connections = connections
        self._limit = limit
        self._tls = tls
        self._handshake_seconds = None if tls is None else handshake_seconds
        self._shedder = shedder if tls is None else None
        self._loop = asyncio.get_running_loop()
        # What hands a connection over, and the protocol that is about to be open.
        self._starting: dict[asyncio.Task[None], object] = {}
        self._silent_until = 0.0

    async def accept(self, listener: socket.socket) -> None:
        """Accept until cancelled."""
        listener.setblocking(False)
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Other descriptors than connections' have used up what was reserved, or memory.
                self._warn(f"no connection can be accepted ({error.strerror}); new ones wait")
                await asyncio.sleep(LOG_SECONDS)
                continue
            accepted = [(connection, address)]
            try:
                if self._shedder is not None and self._shedder.active:
                    await asyncio.sleep(SHED_SECONDS)
                    accepted += _accept_more(listener)
                    accepted = [each for each in accepted if not self._shed(*each)]
                    self._shedder.hand_over()
                while accepted:
                    await self._make_room()
                    self._begin(accepted.pop(0)[0])
            except asyncio.CancelledError:
                for connection, _ in accepted:
                    connection.close()
                raise
            if len(self._starting) >= BURST:
                await asyncio.sleep(0)

    def _shed(self, connection: socket.socket, address: Any) -> bool:
        """Whether its request was refused, and the connection closed."""
        assert self._shedder is not None
        try:
            data = connection.recv(MOST_PEEKED, socket.MSG_PEEK)
            host = address[0] if isinstance(address, tuple) else "-"
            answer = self._shedder.answer(data, host)
            if answer is None:
                return False
            connection.recv(len(data))  # to close with unread data would discard the answer
            connection.send(answer)
        except BlockingIOError:
            return False
        except OSError:
            pass  # it has left
        connection.close()
        return True

    def _begin(self, connection: socket.socket) -> None:
        protocol = self._protocol()
        task = self._loop.create_task(self._start(connection, protocol))
        self._starting[task] = protocol
        task.add_done_callback(self._starting.pop)

    async def _start(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_seconds,
            )
        except OSError as error:
            log.debug("a connection failed before its first request: %s", error)

    async def _make_room(self) -> None:
        while self._count() >= self._limit:
            idle = self._close_idle()
            self._warn(
                f"all {self._limit} connections are in use; {idle} idle ones are closed"
                if idle
                else f"all {self._limit} connections are in use; new ones wait. A higher limit of "
                "open files (ulimit -n) allows more, or another server beside this one"
            )
            await asyncio.sleep(0 if idle else ROOM_SECONDS)

    def _count(self) -> int:
        """Connections that are open or about to be; a protocol is both for a moment."""
        starting = self._starting.values()
        return len(self._connections) + sum(each not in self._connections for each in starting)

    def _close_idle(self) -> int:
        idle = [
            (since, id(each), each)
            for each in self._connections
            if (since := each.idle_since) is not None and not each.transport.is_closing()
        ]
        longest = sorted(idle)[: max(1, self._limit // _SHARE)]
        for _, _, connection in longest:
            connection.transport.close()
        return len(longest)

    def _warn(self, message: str) -> None:
        now = self._loop.time()
        if now >= self._silent_until:
            self._silent_until = now + LOG_SECONDS
            log.warning("%s", message)


def _accept_more(listener: socket.socket) -> list[tuple[socket.socket, Any]]:
    """Those that wait already."""
    accepted: list[tuple[socket.socket, Any]] = []
    with suppress(OSError):  # none waits any more; a fault shows with the next one
        while len(accepted) < BURST:
            connection, address = listener.accept()
            connection.setblocking(False)
            accepted.append((connection, address))
    return accepted
