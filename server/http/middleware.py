"""What happens to every request before its route: pure ASGI, one class per concern.

Pure, because wrappers that build a request of their own hide the client's disconnect. The classes
raise or send the errors of server/errors.py, and know no routes but the open ones.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.server.errors import (
    BodyTooLarge,
    InternalError,
    ServeError,
    ShuttingDown,
    Unauthorized,
    UnsupportedCoding,
    UnsupportedMedia,
    WrongHost,
    WrongOrigin,
    quoted,
)
from ropewalk.server.http.access_log import Exchange, HttpLog
from ropewalk.server.http.streaming import Drain
from ropewalk.server.scheduling.queue import Door

# Reachable without a key, and while draining: for load balancers and supervisors.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ANSWERED = frozenset({"/v1/completions", "/v1/chat/completions"})  # by the engine
_PROBES = OPEN_PATHS | {"/metrics"}  # asked for every few seconds; also answered while draining

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("ropewalk.http")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header, None when absent; repeated ones are joined as HTTP prescribes."""
    values = [value for key, value in scope["headers"] if key == name]
    return b", ".join(values) if values else None


async def send_error(send: Send, error: ServeError) -> None:
    body = error.body()
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": error.headers(len(body)),
        }
    )
    await send({"type": "http.response.body", "body": body})


def state_of(scope: Scope) -> MutableMapping[str, Any]:
    """Shared by all that handle a request: `id`, `client`, `salt`, `model`, `visit`.

    `abort` is the protocol's; `refusal` is the error that it was answered with.
    """
    state: MutableMapping[str, Any] = scope.setdefault("state", {})
    return state


class TrailingSlash:
    """Lets everything inside see a path without the slashes that clients put behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        return await self._app(scope, receive, send)


class Head:
    """Lets the routes see GET for HEAD. The server leaves the answer's body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        return await self._app(scope, receive, send)


class RequestId:
    """Adds an x-request-id to every response; a client's own id is echoed if harmless."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = header(scope, b"x-request-id") or b""
        own = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # A connection that was refused meanwhile has given it one already.
        shown = str(state_of(scope).setdefault("id", own)).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), (b"x-request-id", shown)],
                }
            await send(message)

        return await self._app(scope, receive, send_with_id)


class Logged:
    """Tells the log how each request ended. `template` gives the route's path for a path."""

    def __init__(self, app: ASGIApp, log: HttpLog, template: Callable[[str], str | None]) -> None:
        self._app = app
        self._log = log
        self._template = template

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.perf_counter()
        status: int | None = None
        sent = 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif scope["method"] != "HEAD":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            state = state_of(scope)
            error: ServeError | None = state.get("refusal")
            if status is None and error is not None:  # the connection itself answered
                status = error.status
            exchange = Exchange(
                request_id=state["id"],
                client=(scope.get("client") or ("-",))[0],
                method=scope["method"],
                path=scope["raw_path"].decode("ascii"),
                route=self._template(scope["path"]),
                status=status,
                seconds=time.perf_counter() - began,
                bytes=sent,
            )
            if error is not None:
                self._log.refused(exchange, error, state.get("model"))
            else:
                self._log.answered(exchange, quiet=scope["path"] in _PROBES)


class Origins(CORSMiddleware):
    """Lets web pages of some origins send requests and read answers, from public networks too."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            raise WrongOrigin(
                f"a page of {quoted(request_headers['origin'])} may not send this request "
                f"({bytes(response.body).decode()}); --allowed-origin names origins that may send "
                "GET and POST"
            )
        return response


class RootPath:
    """Takes a proxy's prefix off the path, so that nothing else needs to know it.

    A path that is `known` has none: the prefix may be /v1.
    """

    def __init__(self, app: ASGIApp, prefix: str, known: Callable[[str], object]) -> None:
        self._app = app
        self._prefix = prefix
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(f"{self._prefix}/") and not self._known(path.rstrip("/")):
            scope = {**scope, "path": path.removeprefix(self._prefix)}
        return await self._app(scope, receive, send)


class Guard:
    """The last resort: sends refusals of other middleware and unexpected exceptions as JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass  # the client left before its body was complete: nobody would read an answer
        except (Exception, asyncio.CancelledError) as error:
            # Without this the client would get plain text or a cut connection.
            if started:
                raise
            refusal = _refusal(error, state_of(scope)["id"])
            state_of(scope)["refusal"] = refusal
            await send_error(send, refusal)


def _refusal(error: BaseException, request_id: str) -> ServeError:
    if isinstance(error, ServeError):
        return error
    if isinstance(error, asyncio.CancelledError):  # the server is stopping and no longer waits
        return ShuttingDown()
    _log.error("request %s failed unexpectedly", request_id, exc_info=error)
    return InternalError("the server failed on this request; see its log")


class InFlight:
    """Counts requests in flight for the drain, and refuses new ones while draining."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            return await self._app(scope, receive, send)
        if self._drain.draining:
            raise self._drain.refusal()
        self._drain.in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.in_flight -= 1


class Queued:
    """Refuses requests for answers that would wait too long; puts the Visit of others in the state.

    Outside of BodyLimit and of the routes: nothing of a refused body is read.
    """

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ANSWERED or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        state = state_of(scope)
        state["visit"] = visit = self._door.enter(state.get("client", ""))
        try:
            await self._app(scope, receive, send)
        finally:
            visit.begin()


class AllowedHosts:
    """Refuses requests for other host names: a web page may aim such at a loopback port."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            host = (header(scope, b"host") or b"").decode("latin-1").lower()
            name = re.sub(r":[0-9]*\Z", "", host)
            if name not in self._hosts:
                raise WrongHost(
                    f"this server does not serve the host {quoted(name)}; use the server's own "
                    "name, or start it with --allowed-host"
                )
        return await self._app(scope, receive, send)


class Auth:
    """Requires one of the keys for every path that is not open.

    Puts a salt in the state, so that prefixes are not shared between keys, unless
    `shared_prefixes` is set.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], shared_prefixes: bool) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._shared = shared_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path that the router sees, never a URL built from headers.
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            digest = self._match(header(scope, b"authorization"))
            state = state_of(scope)
            state["client"] = digest.hex()
            state["salt"] = "" if self._shared else digest.hex()
        return await self._app(scope, receive, send)

    def _match(self, authorization: bytes | None) -> bytes:
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("the API key is missing; send the header Authorization: Bearer KEY")
        given = hashlib.sha256(key).digest()
        # Compares every key, so that the time does not reveal which one matches.
        matches = [digest for digest in self._digests if hmac.compare_digest(digest, given)]
        if not matches:
            raise Unauthorized("this API key is not valid; check the Authorization header")
        return matches[0]


class BodyLimit:
    """Admits JSON bodies of a bounded size; refuses others before they are read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length[:19]) > self._limit:
            raise self._too_large()
        if scope["method"] == "POST":
            _check_media(scope)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        return await self._app(scope, counted, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self._limit} bytes (--max-body); send a smaller one"
        )


def _check_media(scope: Scope) -> None:
    coding = header(scope, b"content-encoding")
    if coding is not None and coding.strip().lower() != b"identity":
        raise UnsupportedCoding("compressed bodies are not supported; send plain JSON")
    media = (header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise UnsupportedMedia("the body must be JSON; send Content-Type: application/json")
