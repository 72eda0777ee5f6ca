"""What happens to every request before its route: pure ASGI, one class per concern.

Pure, because wrappers that build a request of their own hide the client's disconnect. The classes
raise the errors of server/errors.py, which Guard sends.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterable, MutableMapping
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
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
from ropewalk.server.http.access_log import Exchange, HttpLog, choose_id
from ropewalk.server.http.door import Door
from ropewalk.server.http.streaming import Drain

# Reachable without a key, and while draining: for load balancers and supervisors.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ANSWERED = frozenset(  # by the engine
    f"/v1/{name}"
    for name in ("completions", "chat/completions", "embeddings", "responses", "messages")
)
_PROBES = OPEN_PATHS | {"/metrics"}  # asked for every few seconds; also answered while draining

# What clients get wrong is the part before: a base URL without /v1, or with it twice.
_MOST_BEFORE = 3
_log = logging.getLogger("ropewalk.http")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header, None when absent; repeated ones are joined as HTTP prescribes."""
    values = [value for key, value in scope["headers"] if key == name]
    return b", ".join(values) if values else None


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for the explorer, which holds nothing and asks for a key itself."""
    asked = scope["method"] == "GET" and scope["path"] == "/"
    return asked and b"text/html" in (header(scope, b"accept") or b"")


def state_of(scope: Scope) -> MutableMapping[str, Any]:
    """Shared by all that handle a request: `id`, `method`, `client`, `salt`, `model`, `visit`.

    `held` is closed when the request is over, and what it holds let go of.
    `requests` are what the engine was asked for, `n` of them for each prompt; `failure` says how
    they ended if not well. `abort` is the protocol's. `status` is of the answer once it has begun;
    `refusal` is the error that it was answered with.
    """
    state: MutableMapping[str, Any] = scope.setdefault("state", {})
    return state


class Paths:
    """Knows every route's path, such as /v1/models/{name}."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._paths = [(route.path_regex, route.path_format) for route in routes]

    def template(self, path: str) -> str | None:
        """Of the route for that path; None where there is none."""
        return next((form for regex, form in self._paths if regex.match(path)), None)

    def meant(self, path: str) -> str | None:
        """The path of the API that ends as this one does."""
        parts = path.split("/")[1:]
        for start in range(min(len(parts), _MOST_BEFORE + 1)):
            end = "/" + "/".join(parts[start:])
            for guess in (f"/v1{end}", end):
                if guess != path and self.template(guess) is not None:
                    return guess
        return None


class Refusal(Response):
    """The answer that an error makes, in the form of the API that was asked."""

    def __init__(self, error: ServeError, path: str) -> None:
        super().__init__(error.body(path), error.status)
        self.raw_headers = error.headers(len(self.body))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state_of(scope)["refusal"] = self._error
        await super().__call__(scope, receive, send)


class Addressed:
    """Lets everything inside see a path of the API, and GET for HEAD.

    That is a path without the slashes that clients put behind it, and without a proxy's `prefix`;
    but one that the API has stays as it is, since the prefix may be /v1. The server itself leaves
    out the body for HEAD.

    It is the outermost: what is inside sees nothing but requests.
    """

    def __init__(self, app: ASGIApp, prefix: str, paths: Paths) -> None:
        self._app = app
        self._prefix = prefix
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server starts, or stops
            await scope["app"].router(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        state_of(scope)["method"] = method
        prefixed = self._prefix and f"{path}/".startswith(f"{self._prefix}/")
        if prefixed and self._paths.template(path.rstrip("/")) is None:
            path = path.removeprefix(self._prefix)
        path = path.rstrip("/") or "/"
        method = "GET" if method == "HEAD" else method
        await self._app({**scope, "path": path, "method": method}, receive, send)


class Recorded:
    """Gives each request an id, which its answer shows, and tells the log how it ended.

    A client's own id is echoed if it is harmless.
    """

    def __init__(self, app: ASGIApp, log: HttpLog, paths: Paths) -> None:
        self._app = app
        self._log = log
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, state = time.perf_counter(), state_of(scope)
        own = choose_id(header(scope, b"x-request-id"))
        # A connection that was refused meanwhile has given it one already.
        shown = str(state.setdefault("id", own)).encode()
        sent = 0

        async def recorded(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", shown)]
                message = {**message, "headers": headers}
            elif state["method"] != "HEAD":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        finally:
            error: ServeError | None = state.get("refusal")
            # With an error but no answer, the connection itself has answered.
            status = state.get("status", error.status if error else None)
            exchange = Exchange(
                request_id=state["id"],
                client=(scope.get("client") or ("-",))[0],
                method=state["method"],
                path=scope["raw_path"].decode("ascii"),
                route=self._paths.template(scope["path"]),
                status=status,
                seconds=time.perf_counter() - began,
                bytes=sent,
            )
            if error is not None:
                self._log.refused(exchange, error, state.get("model"))
            else:
                self._log.answered(exchange, quiet=scope["path"] in _PROBES)
            # A connection keeps the state of its last request, but must not keep a model alive.
            state.pop("requests", None)


class Traces(Protocol):
    """Where requests are told of that are over: server/tracing.py."""

    def record(self, scope: Scope, began: int) -> None: ...
    def close(self) -> None: ...


class Traced:
    """Tells of each request that the engine was to answer, refused ones included."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ANSWERED or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        began = time.time_ns()
        try:
            await self._app(scope, receive, send)
        finally:
            try:
                self._traces.record(scope, began)
            except Exception:  # the request has its answer
                _log.exception("request %s could not be traced", state_of(scope)["id"])


class Origins(CORSMiddleware):
    """Lets web pages of some origins send requests and read answers, from public networks too."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["DELETE", "GET", "HEAD", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["x-request-id", "x-should-retry", "retry-after"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            return Refusal(
                WrongOrigin(
                    f"a page of {quoted(request_headers['origin'])} may not send this request "
                    f"({bytes(response.body).decode()}); --allowed-origin names origins that may "
                    "send GET, POST and DELETE"
                ),
                path="",
            )
        return response


class Guard:
    """Sends every error of what is inside, expected or not, as JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass  # the client left before its body was complete: nobody would read an answer
        except (Exception, asyncio.CancelledError) as error:
            # Without this the client would get plain text or a cut connection.
            if "status" in state_of(scope):
                raise
            refusal = Refusal(_refusal(error, state_of(scope)["id"]), scope["path"])
            await refusal(scope, receive, send)


def _refusal(error: BaseException, request_id: str) -> ServeError:
    if isinstance(error, ServeError):
        return error
    if isinstance(error, asyncio.CancelledError):  # the server is stopping and no longer waits
        return ShuttingDown()
    _log.error("request %s failed unexpectedly", request_id, exc_info=error)
    return InternalError("the server failed on this request; see its log")


class Admission:
    """Refuses new requests while draining, and those for answers that would wait too long.

    Counts the others for the drain and puts the Visit of each that the engine is to answer in the
    state. Outside of BodyLimit and of the routes: nothing of a refused body is read.
    """

    def __init__(self, app: ASGIApp, drain: Drain, door: Door) -> None:
        self._app = app
        self._drain = drain
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _PROBES:
            return await self._app(scope, receive, send)
        if self._drain.draining:
            raise self._drain.refusal()
        self._drain.in_flight += 1
        try:
            state = state_of(scope)
            with ExitStack() as state["held"]:
                if scope["path"] in ANSWERED and scope["method"] == "POST":
                    state["visit"] = self._door.enter(state.get("client", ""))
                    state["held"].callback(state["visit"].begin)
                await self._app(scope, receive, send)
        finally:
            self._drain.in_flight -= 1


class Callers:
    """Who may ask: by the server's names, any if there are none, and with the API keys likewise.

    Names, since a web page may aim others at a loopback port. Each key is a client.
    """

    def __init__(self, names: Collection[str], keys: Collection[str]) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def client(self, scope: Scope) -> str:
        """Whose key a request brings, "" without keys. Raises WrongHost, Unauthorized."""
        self.check_host(scope)
        return self.check_key(scope)

    def check_host(self, scope: Scope) -> None:
        """Raises WrongHost."""
        if not self._names:
            return
        host = (header(scope, b"host") or b"").decode("latin-1").lower()
        name = re.sub(r":[0-9]*\Z", "", host)
        if name not in self._names:
            raise WrongHost(
                f"this server does not serve the host {quoted(name)}; use a name that it serves, "
                "such as localhost where it is on your machine, or start it with --allowed-host"
            )

    def check_key(self, scope: Scope) -> str:
        """Whose it is. Raises Unauthorized.

        Anthropic's clients send a key as x-api-key, some of them beside another as a bearer's.
        """
        if not self._digests:
            return ""
        scheme, _, bearer = (header(scope, b"authorization") or b"").partition(b" ")
        sent = (bearer if scheme.lower() == b"bearer" else b"", header(scope, b"x-api-key"))
        given = [hashlib.sha256(key).digest() for key in sent if key]
        if not given:
            raise Unauthorized("the API key is missing; send the header Authorization: Bearer KEY")
        # Compares every key, so that the time does not reveal which one matches.
        matches = [own for own in self._digests for key in given if hmac.compare_digest(own, key)]
        if not matches:
            raise Unauthorized("this API key is not valid; check Authorization or x-api-key")
        return matches[0].hex()


class Auth:
    """Lets only its callers in, but for paths that are open.

    Puts a salt in the state, so that prefixes are not shared between keys, unless
    `shared_prefixes` is set.
    """

    def __init__(self, app: ASGIApp, callers: Callers, shared_prefixes: bool) -> None:
        self._app = app
        self._callers = callers
        self._shared = shared_prefixes
        self._secret = secrets.token_bytes(16)  # so that what tells of salts tells of no key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The path that the router sees, never a URL built from headers.
        if scope["path"] not in OPEN_PATHS:
            self._callers.check_host(scope)
            if not wants_page(scope):
                client, state = self._callers.check_key(scope), state_of(scope)
                state["client"] = client
                state["salt"] = self._salt(client) if client and not self._shared else ""
        return await self._app(scope, receive, send)

    def _salt(self, client: str) -> str:
        return hashlib.blake2b(client.encode(), key=self._secret, digest_size=16).hexdigest()


class BodyLimit:
    """Admits JSON bodies of a bounded size; refuses others before they are read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
