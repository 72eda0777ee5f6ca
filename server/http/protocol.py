"""HTTP on the socket: bounded, strict, and stoppable. Builds on internals of uvicorn (pinned).

A connection must deliver a request by an absolute deadline. Input that h11 accepts but that two
parsers could read differently is refused, as JSON like all refusals. A client that has closed its
side after a whole request is answered, unless it has left. `Server` keeps listening while it
drains.
"""

import asyncio
import re
import select
import signal
import socket
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ropewalk.server import listen
from ropewalk.server.errors import BadRequest, HeadersTooLarge, ReceiveTimeout, ServeError
from ropewalk.server.http.chunked import ChunkedReader
from ropewalk.server.http.door import Acceptor, max_connections
from ropewalk.server.http.streaming import Drain

MAX_HEAD = 16 << 10
MAX_HEADERS = 64
MAX_TARGET = 4 << 10
HEAD_SECONDS = 10.0
REQUEST_SECONDS = 30.0
# How long a refused client's further input is read. Closing at once would reset the connection,
# which can discard the refusal before the client reads it (RFC 9112, section 9.6).
LINGER_SECONDS = 1.0
# How long a client may read nothing of the data that waits for it. Longer than a stream's own
# limit, so that a stream ends, and is counted, first.
UNREAD_SECONDS = 60.0
# How often a client that sends nothing more is looked at: has it left?
LEFT_SECONDS = 0.05
# To a client that closed its side. Once it has left, its system knows the connection for a minute
# at most, and from then on answers that there is none.
PROBE_SECONDS = 5
# How long the server waits for connections to close once everything is answered or cut.
CLOSING_SECONDS = 2

# Bare line ends, folded lines and NUL: where two parsers may see different headers.
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\r\n[ \t]|\0")
# A target with scheme and host, as it is sent to proxies.
_ABSOLUTE = re.compile(
    rb"https?://((?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]*)?)((?:[/?].*)?)", re.IGNORECASE
)


# Every answer begins with this, whatever its status will be.
_VERSION = b"HTTP/1.1 "


class StrictConnection(h11.Connection):
    """h11 without its lenience. `refusal` says why an event was refused."""

    refusal: ServeError | None = None
    # Of the request, as far as they are known.
    asked: tuple[str, str] = ("-", "-")  # method and target
    answer_has_body = True
    _begun = False  # `begin_answer` was called, and no answer sent since

    def next_event(self) -> Any:
        """Like h11's; on a refusal, sets `refusal` and raises h11.RemoteProtocolError."""
        if self.refusal is None and self.their_state is h11.IDLE:
            head = self.trailing_data[0]
            self.asked, self.answer_has_body = ("-", "-"), not head.startswith(b"HEAD ")
            if not self.answer_has_body:  # h11 learns it only from heads that are well-formed
                self._request_method = b"HEAD"
            self._check_head(head)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                self.refusal = _head_too_large()
            raise
        if isinstance(event, h11.Request):
            self.asked = event.method.decode(), event.target.decode()
            self._check_request(event)
            if any(name == b"transfer-encoding" for name, _ in event.headers):
                self._reader = ChunkedReader(self._refuse)
            if not event.target.startswith(b"/"):
                return self._with_path(event)
        return event

    def begin_answer(self) -> bytes:
        """The first bytes of the next answer, which `send` then leaves out."""
        self._begun = True
        return _VERSION

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]
        data: bytes | None = super().send(event)
        if data and self._begun:
            self._begun = False
            return data.removeprefix(_VERSION)
        return data

    def _check_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        head = data if end < 0 else data[: end + 2]
        if len(head) > MAX_HEAD:
            self._refuse(_head_too_large())
        if _AMBIGUOUS.search(head):
            self._refuse(
                BadRequest("the request line or a header is malformed; end each line with CRLF")
            )

    def _check_request(self, event: h11.Request) -> None:
        if event.http_version not in (b"1.0", b"1.1"):
            self._refuse(BadRequest("this HTTP version is not supported; use HTTP/1.1"))
        names = [name for name, _ in event.headers]
        if len(names) > MAX_HEADERS or len(event.target) > MAX_TARGET:
            self._refuse(_head_too_large())
        if b"content-length" in names and b"transfer-encoding" in names:
            self._refuse(
                BadRequest(
                    "Content-Length and Transfer-Encoding are mutually exclusive; send one of them"
                )
            )
        if b"transfer-encoding" in names and event.http_version == b"1.0":
            self._refuse(BadRequest("HTTP/1.0 has no Transfer-Encoding; use HTTP/1.1"))

    def _with_path(self, event: h11.Request) -> h11.Request:
        """The same request with a path as its target and the target's host as its Host header.

        The one header that names the host then cannot differ from it: RFC 9112, section 3.2.2.
        """
        if event.target == b"*" or event.method == b"CONNECT":  # there is nothing at either
            return event
        absolute = _ABSOLUTE.fullmatch(event.target)
        if absolute is None:
            self._refuse(BadRequest("the request target is malformed; send a path like /health"))
        host, path = absolute.groups()
        return h11.Request(
            method=event.method,
            target=path if path.startswith(b"/") else b"/" + path,
            headers=[(b"host", host), *(pair for pair in event.headers if pair[0] != b"host")],
            http_version=event.http_version,
        )

    def _refuse(self, refusal: ServeError) -> NoReturn:
        self.refusal = refusal
        raise h11.RemoteProtocolError(refusal.message, error_status_hint=refusal.status)


def _head_too_large() -> ServeError:
    return HeadersTooLarge(
        f"the headers exceed {MAX_HEAD} bytes or {MAX_HEADERS} lines, or the target exceeds "
        f"{MAX_TARGET} bytes; shorten them"
    )


class Protocol(H11Protocol):
    """One connection. A deadline runs from a request's first byte until it has arrived whole."""

    head_seconds = HEAD_SECONDS
    request_seconds = REQUEST_SECONDS
    linger_seconds = LINGER_SECONDS
    unread_seconds = UNREAD_SECONDS
    probe_seconds = PROBE_SECONDS
    conn: StrictConnection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER, MAX_HEAD)
        self.app_state = {**self.app_state, "abort": self._abort}
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._armed_at = 0.0
        self._waiting_since = self.loop.time()
        self._receiving: object = None  # the cycle whose body is awaited
        self._refused = False  # further input is ignored
        self._ended = False  # the client has closed its side
        self._left: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # So that any unsent data calls `pause_writing`. TLS would pause for none, too, at 0; its
        # own transport below sends up to 64 KiB more before this one waits.
        transport.set_write_buffer_limits(1 if self.scheme == "https" else 0)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_watching()
        if self._left is not None:
            self._left.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch_unread(self) -> None:
        """Without this even a closed connection would wait for its client for ever."""
        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.unread_seconds, self._cut_unread, left)

    def _cut_unread(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._watch_unread()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Stay open for a client that may be waiting for its answer.

        One that has left looks the same until something is sent to it, be it a probe: its system
        then says so.
        """
        first, self._ended = not self._ended, True
        if not self._answering() or self.scheme == "https":  # TLS has no half-closed connections
            return False
        if first:
            if not self.cycle.response_started:
                self.transport.write(self.conn.begin_answer())
            probe(self.transport.get_extra_info("socket"), self.probe_seconds)
            self._look_if_left()
        return True

    def _answering(self) -> bool:
        """Whether a request has arrived whole and awaits its answer."""
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.their_state not in (h11.SEND_BODY, h11.ERROR)
        )

    def _look_if_left(self) -> None:
        if has_left(self.transport.get_extra_info("socket").fileno()):
            self.transport.abort()
        else:
            self._left = self.loop.call_later(LEFT_SECONDS, self._look_if_left)

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()
        if self._ended and not self._answering():
            self.transport.close()

    @property
    def idle_since(self) -> float | None:
        """When it began to wait for a request; None while there is one, or a part of one."""
        if (
            (self.cycle is None or self.cycle.response_complete)
            and self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
            and not self.transport.get_write_buffer_size()
        ):
            return self._waiting_since
        return None

    def handle_events(self) -> None:
        super().handle_events()
        if self._refused or self.transport.is_closing():
            return
        receiving = self.conn.their_state
        if receiving is h11.DONE and len(self.conn.trailing_data[0]) <= MAX_HEAD:
            # uvicorn stops reading at the next request, and would not see the client leave.
            self.flow.resume_reading()
        if receiving is h11.SEND_BODY:
            if self._receiving is not self.cycle:
                self._receiving = self.cycle
                if self._deadline is None:  # its head arrived in one piece
                    self._armed_at = self.loop.time()
                self._set_deadline(self._armed_at + self.request_seconds)
        elif receiving is h11.IDLE and self.conn.trailing_data[0]:  # the start of another head
            if self._deadline is None:
                self._arm()
        elif self.cycle is not None:
            self._disarm()
            self._keep_alive()

    def _keep_alive(self) -> None:
        """For a body that ends after its request was answered: there uvicorn sets no timeout."""
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: that an upgrade is ignored is no fault (Java's client asks for one)."""

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for whatever h11 or StrictConnection refuses."""
        self._refuse(
            self.conn.refusal
            or BadRequest("this is not a valid HTTP/1.1 request; use an HTTP client")
        )

    def _arm(self) -> None:
        self._armed_at = self.loop.time()
        self._set_deadline(self._armed_at + self.head_seconds)

    def _set_deadline(self, due: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_at(due, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self._refuse(
            ReceiveTimeout("the request did not arrive completely in time; send it without pauses")
        )

    def _refuse(self, error: ServeError) -> None:
        self._disarm()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body(self.conn.asked[1])
            request_id = self._note(error)
            response = h11.Response(
                status_code=error.status,
                headers=[*error.headers(len(body)), (b"x-request-id", request_id.encode())],
                reason=STATUS_PHRASES[error.status],
            )
            data = [h11.Data(data=body)] if self.conn.answer_has_body else []
            for event in (response, *data, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            with suppress(OSError):  # the client has left
                self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(self.linger_seconds, self.transport.close)
        self._leave()

    def _note(self, error: ServeError) -> str:
        """Tell the application, which logs and counts refusals; returns the request's id."""
        request_id = uuid.uuid4().hex
        if self.cycle is not None and not self.cycle.response_complete:
            state = self.scope["state"]  # of a request whose end the application will log
            state["refusal"] = error
            return str(state.setdefault("id", request_id))
        unasked = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not unasked and "unread" in self.app_state:
            self.app_state["unread"](error, request_id, self.client, *self.conn.asked)
        return request_id

    def _leave(self) -> None:
        """Wake the application, if it still waits for this request, with a disconnect."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False  # the answer is on its way instead
            self.cycle.message_event.set()

    def _abort(self) -> None:
        self.transport.abort()


def probe(connection: socket.socket, seconds: int) -> None:
    """Ask the peer's system so often whether the connection is still there, where it is TCP."""
    if connection.family is not socket.AF_UNIX and sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)


def has_left(descriptor: int) -> bool:
    """Whether the peer has dropped the connection, rather than only closed its own side."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups and errors are always told
    return bool(poll.poll(0))


class Server(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT and exits 0; the second one cuts what is left.

    SIGHUP, which comes when a terminal closes, drains too, and cuts nothing when it comes again.
    Under nohup it stays ignored.

    While draining the listener stays open: /health/ready and every new request answer 503, and
    requests accepted earlier, queued ones included, run to their end. Those still running after
    `drain_seconds` get an error frame.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_seconds: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._signals = 0
        self._hung_up = False
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._listeners = sockets or [listen.bind(self.config.host, self.config.port)]
        for listener in self._listeners:
            listener.listen(self.config.backlog)
        await super().startup(sockets=[])  # the application's; uvicorn would accept without limit
        acceptor = Acceptor(
            self._connection,
            cast(set[Protocol], self.server_state.connections),
            max_connections(),
            tls=self.config.ssl,
            handshake_seconds=HEAD_SECONDS,
            shedder=self.lifespan.state.get("shedder"),
        )
        self._accepting = [
            asyncio.create_task(acceptor.accept(listener)) for listener in self._listeners
        ]

    def _connection(self) -> asyncio.Protocol:
        kind = cast(type[Protocol], self.config.http_protocol_class)
        return kind(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        await super().shutdown(sockets=self._listeners)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            in_main = threading.current_thread() is threading.main_thread()
            if not in_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Runs in a signal handler, so it only takes note. Unlike in uvicorn the signal is not
        # raised again at the end, because a drained server has exited normally.
        if sig == signal.SIGHUP:
            self._hung_up = True
        else:
            self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's heartbeat, ten times a second."""
        for task in self._accepting:
            if task.done():
                task.result()  # raises what ended it: better no server than a deaf one
        if self._signals or self._hung_up:
            self._progress()
        return await super().on_tick(counter)

    def _progress(self) -> None:
        if not self._drain.draining:
            self._drain.begin(self._drain_seconds)
        if self._signals > 1 or time.monotonic() >= self._drain.cut_at:
            self._drain.cut()
            self.should_exit = True
        elif self._drain.in_flight == 0:
            self.should_exit = True


def uvicorn_config(
    app: Any, *, host: str, port: int, tls: ssl.SSLContext | None = None, **more: Any
) -> uvicorn.Config:
    """uvicorn's settings for this protocol. `more` is for uvicorn's logging options."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Protocol,
        ws="none",
        lifespan="on",
        h11_max_incomplete_event_size=MAX_HEAD,
        limit_concurrency=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        **more,
    )
