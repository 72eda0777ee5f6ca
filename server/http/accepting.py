"""Accepts connections, never more than there are file descriptors for.

asyncio's own server accepts what it can and fails, loudly and over and over, when descriptors run
out. Here the longest idle connections are closed to make room, and where none is idle, new ones
wait in the system's queue. Knows no HTTP.
"""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, Protocol

from ropewalk.server.http.shedding import Shedder

# Of any machine: each takes some 20 KB, and limits of a million descriptors are common.
MOST_CONNECTIONS = 8192
# Descriptors kept for everything else: files, pipes to children, the engine.
RESERVED = 128
ROOM_SECONDS = 0.05  # between looks for room
BURST = 64  # connections that are accepted before others have their turn
LOG_SECONDS = 1.0
# While requests are refused, new connections wait so long for one another, and for their requests.
SHED_SECONDS = 0.02
MOST_PEEKED = 64 << 10  # bytes of a request that may be refused at once
# One in so many is closed at a time, so that the search for the longest idle ones is rare.
_SHARE = 32

log = logging.getLogger("ropewalk.http")


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
        self._starting: set[asyncio.Task[None]] = set()  # connections that are not open yet
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
        task = self._loop.create_task(self._start(connection))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_seconds,
            )
        except OSError as error:
            log.debug("a connection failed before its first request: %s", error)

    async def _make_room(self) -> None:
        while len(self._connections) + len(self._starting) >= self._limit:
            idle = self._close_idle()
            self._warn(
                f"all {self._limit} connections are in use; {idle} idle ones are closed"
                if idle
                else f"all {self._limit} connections are in use; new ones wait. A higher limit of "
                "open files (ulimit -n) allows more, or another server beside this one"
            )
            await asyncio.sleep(0 if idle else ROOM_SECONDS)

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
