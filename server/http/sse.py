"""Server-sent events over ASGI: framing, pings, and a client that stops reading.

Knows bytes and the clock; nothing of completions.
"""

import asyncio

from starlette.types import Send

from ropewalk.server.errors import Headers
from ropewalk.server.http.cancellation import End, Lifeline

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]
PING = b": ping\n\n"
DONE = "data: [DONE]\n\n"


class EventStream:
    """One response. Sends headers with the first event, and after it pings when idle.

    A write that is blocked for `stalled_s` ends the lifeline as STALLED.
    """

    def __init__(self, send: Send, lifeline: Lifeline, *, ping_s: float, stalled_s: float) -> None:
        self.started = False
        self._send = send
        self._lifeline = lifeline
        self._ping_s = ping_s
        self._stalled_s = stalled_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None
        self._blocked_since: float | None = None
        self._last = 0.0

    async def write(self, data: bytes) -> None:
        """Send whole events. Each call is one write, so pass everything that is due."""
        await self._write(data, more=True)

    async def finish(self, data: bytes) -> None:
        """Send the last events and end the response."""
        await self._write(data, more=False)
        self._lifeline.complete()
        self.close()

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.started:
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
            )
            self.started = True
            self._timer = self._loop.call_later(self._ping_s, self._tick)
        if self._ping is not None:
            await self._ping
        await self._put(data, more=more)

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

    async def _put_ping(self) -> None:
        await self._put(PING, more=True)
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
                self._ping = self._loop.create_task(self._put_ping())
                due = now + min(self._ping_s, self._stalled_s)
        self._timer = self._loop.call_at(due, self._tick)
