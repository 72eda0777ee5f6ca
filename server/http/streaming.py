"""Answers over ASGI, server-sent events or one body, and what stops them before they are done.

Knows bytes, the clock and one refusal; neither the engine nor completions.
"""

import asyncio
import time
from enum import Enum, auto
from math import ceil
from types import TracebackType
from typing import Self

from starlette.types import Receive, Send

from ropewalk.server.errors import MAX_RETRY_AFTER, Headers, ShuttingDown

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


class End(Enum):
    DISCONNECTED = auto()  # the client went away
    STALLED = auto()  # the client stopped reading
    DEADLINE = auto()  # the total time for a request is over
    SHUTDOWN = auto()  # the drain's limit is reached


class Ended(Exception):
    """Leaves an `async with Lifeline(...)` block that was cut short."""

    def __init__(self, why: End) -> None:
        super().__init__(why.name.lower())
        self.why = why


class Lifeline:
    """Cancels the block it guards when the client leaves, time is over or the server must stop.

    Enter it once the body is read: it consumes `receive` until the client disconnects.
    """

    def __init__(self, receive: Receive, seconds: float, drain: "Drain") -> None:
        self._receive = receive
        self._drain = drain
        self._timeout = asyncio.timeout(seconds)
        self._why: End | None = None
        self._watch: asyncio.Task[None] | None = None
        self._complete = False

    def end(self, why: End) -> None:
        """Cut the block short; the first reason stays."""
        if self._watch is not None and not self._complete and not self._timeout.expired():
            self._why = why
            self._timeout.reschedule(0)

    def complete(self) -> None:
        """Call as soon as the answer is sent: a client that leaves from now on has everything."""
        self._complete = True

    async def __aenter__(self) -> Self:
        if self._drain.over:
            raise Ended(End.SHUTDOWN)
        await self._timeout.__aenter__()
        self._watch = asyncio.create_task(self._watch_client())
        self._drain.lifelines.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._drain.lifelines.discard(self)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise Ended(self._why or End.DEADLINE) from None

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(End.DISCONNECTED)


class Drain:
    """Whether the server is shutting down, and which requests are still unanswered.

    The server (server/http/protocol.py) begins and cuts the drain; the middleware counts requests.
    """

    def __init__(self) -> None:
        self.draining = False
        self.over = False
        self.cut_at = 0.0  # monotonic; when the drain's limit is reached
        self.in_flight = 0
        self.lifelines: set[Lifeline] = set()

    def begin(self, seconds: float) -> None:
        """From now on new requests are refused; running ones have this long to end."""
        self.draining = True
        self.cut_at = time.monotonic() + seconds

    def refusal(self) -> ShuttingDown:
        """What new requests get, with the longest that the server may still take to be gone."""
        left = ceil(self.cut_at - time.monotonic())
        return ShuttingDown(retry_after=min(max(left, 1), MAX_RETRY_AFTER))

    def cut(self) -> None:
        """End every request with an error, including those whose body has not arrived yet."""
        self.over = True
        for lifeline in list(self.lifelines):
            lifeline.end(End.SHUTDOWN)


class EventStream:
    """One response. Sends headers with the first event or ping, and `ping` when idle.

    A write that is blocked for `stalled_s` ends the lifeline as STALLED. `whole` sends no events.
    """

    def __init__(
        self, send: Send, lifeline: Lifeline, *, ping: bytes, ping_s: float, stalled_s: float
    ) -> None:
        self.started = False
        self._send = send
        self._lifeline = lifeline
        self._ping_event = ping
        self._ping_s = ping_s
        self._stalled_s = stalled_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None
        self._blocked_since: float | None = None
        self._last = 0.0

    def begin_within(self, seconds: float) -> None:
        """Ping after so long, even if there is no event yet; from then on errors are events."""
        self._timer = self._loop.call_later(seconds, self._begin_ping)

    async def write(self, data: bytes) -> None:
        """Send whole events. Each call is one write, so pass everything that is due."""
        await self._write(data, more=True)

    async def finish(self, data: bytes) -> None:
        """Send the last events and end the response."""
        await self._write(data, more=False)
        self._lifeline.complete()
        self.close()

    async def whole(self, body: bytes) -> None:
        """Send one JSON body in place of events."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
        self._lifeline.complete()

    async def _write(self, data: bytes, *, more: bool) -> None:
        if self._ping is not None:
            await self._ping
        await self._start()
        await self._put(data, more=more)

    async def _start(self) -> None:
        if self.started:
            return
        if self._timer is not None:
            self._timer.cancel()
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        self.started = True
        self._timer = self._loop.call_later(self._ping_s, self._tick)

    def close(self) -> None:
        """Stop pinging. The response itself is ended by `finish`, or left cut."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ping is not None:
            self._ping.cancel()
            self._ping = None

    async def _put(self, data: bytes, *, more: bool) -> None:
        self._blocked_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._blocked_since = None
        self._last = self._loop.time()

    def _begin_ping(self) -> None:
        self._ping = self._loop.create_task(self._put_ping())

    async def _put_ping(self) -> None:
        await self._start()
        await self._put(self._ping_event, more=True)
        self._ping = None

    def _tick(self) -> None:
        now = self._loop.time()
        if self._blocked_since is not None:
            due = self._blocked_since + self._stalled_s
            if now >= due:
                self._timer = None
                self._lifeline.end(End.STALLED)
                return
        else:
            due = self._last + self._ping_s
            if now >= due:
                self._begin_ping()
                due = now + min(self._ping_s, self._stalled_s)
        self._timer = self._loop.call_at(due, self._tick)
