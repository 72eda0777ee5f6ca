"""What Ray's proxy does besides routing: ASGI, in the proxy's process. No torch, no Ray.

Ray calls `middlewares` where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
"""

import asyncio
import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic_core import from_json
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.server.errors import (
    DeadlineExceeded,
    NotReady,
    QueueFull,
    ReceiveTimeout,
    ServeError,
)

# The header from which Ray's consistent-hash router takes its key.
SESSION = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").lower().encode()
_PROMPTS = frozenset(
    f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages")
)
BEGUN = 64  # messages before the first of the user
BEGINNING = 1024  # characters of a prompt, or of a conversation's first user message
_READ = 256 << 10  # bytes of a body: parsing these takes a few milliseconds
BODY_SECONDS = 30.0  # as a server without Ray waits


def middlewares() -> list[Middleware]:
    """For Ray: the last one is outermost."""
    return [Middleware(Keyed), Middleware(Finished)]


class Keyed:
    """Names a session where the client named none: prompts with one beginning have one.

    So a conversation's turns, and questions about one document, reach the replica that has their
    keys and values. The body must begin to arrive before Ray routes the request, hence a deadline.
    """

    def __init__(self, app: ASGIApp, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["path"].rstrip("/").endswith(tuple(_PROMPTS))
        if not asked or any(name == SESSION for name, _ in scope["headers"]):
            return await self._app(scope, receive, send)
        held: deque[Message] = deque()
        size, more = 0, True
        try:
            async with asyncio.timeout(self._seconds):
                while more and size < _READ:
                    held.append(message := await receive())
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            error = ReceiveTimeout(
                "the request did not arrive completely in time; send it without pauses"
            )
            return await _refuse(error, scope["path"], send)

        async def replayed() -> Message:
            return held.popleft() if held else await receive()

        key = session(b"".join(message.get("body", b"") for message in held)[:_READ])
        if key is not None:
            scope = {**scope, "headers": [*scope["headers"], (SESSION, key.encode())]}
        await self._app(scope, replayed, send)


def session(body: bytes) -> str | None:
    """A name for how a body's prompt begins, from the body's first bytes; None if there is none.

    Of a conversation: all before its first user message, and the beginning of that. So it is the
    same in every turn, and different users of one system prompt are spread. A `prompt_cache_key`
    stands for all of it, as for OpenAI.
    """
    with suppress(ValueError):  # not JSON, or a number too long to write: the replica refuses it
        fields = from_json(body.decode(errors="ignore"), allow_partial="trailing-strings")
        if isinstance(fields, dict) and (begins := _beginnings(fields)):
            return hashlib.blake2b(json.dumps(begins).encode(), digest_size=12).hexdigest()
    return None


def _beginnings(fields: Mapping[str, Any]) -> list[Any]:
    model, key = fields.get("model"), fields.get("prompt_cache_key")
    if key:
        return [model, key]
    for said in (fields.get(name) for name in ("messages", "input", "prompt")):
        if said:
            return [model, fields.get("system"), fields.get("instructions"), *_beginning(said)]
    return []


def _beginning(said: Any) -> list[Any]:
    """`said`: a text, texts, token ids, or messages."""
    if isinstance(said, str):
        return [said[:BEGINNING]]
    if not isinstance(said, list):
        return []
    found: list[Any] = []
    for message in said[:BEGUN]:
        if not isinstance(message, dict):
            return [json.dumps(said[:BEGINNING])[:BEGINNING]]
        if message.get("role") == "user":
            return [*found, json.dumps(message.get("content"))[:BEGINNING]]
        found.append(message)
    return found


class Finished:
    """Ends with an error what a lost replica leaves, and says Ray's own refusals as the API does.

    Ray would close the connection, and answer in plain text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began: Message | None = None
        error: ServeError | None = NotReady(
            "the replica that had this request has ended; send it again"
        )

        async def watched() -> Message:
            nonlocal error
            message = await receive()
            if message["type"] == "http.disconnect":
                error = None
            return message

        async def noted(message: Message) -> None:
            nonlocal began, error
            if message["type"] == "http.response.start":
                if refusal := _refusal(message):
                    error = refusal
                    return
                # Ray adds the request's id once more.
                told_once = [*dict.fromkeys(map(tuple, message["headers"]))]
                began = {**message, "headers": told_once}
                return await send(began)
            if began is None:
                return  # the text of a refusal
            if not message.get("more_body", False):
                error = None
            await send(message)

        await self._app(scope, watched, noted)
        if error is None:
            return
        if began is None:
            return await _refuse(error, scope["path"], send)
        if (b"content-type", b"text/event-stream; charset=utf-8") in began["headers"]:
            kind = b"event: error\n" if scope["path"].startswith("/v1/messages") else b""
            frame = kind + b"data: " + error.body(scope["path"]) + b"\n\n"
            await send({"type": "http.response.body", "body": frame})


def _refusal(start: Message) -> ServeError | None:
    """Of Ray, whose own answers are plain text; a replica's errors are not."""
    headers = dict(start["headers"])
    if not headers.get(b"content-type", b"").startswith(b"text/plain"):
        return None
    if start["status"] == 429:
        after = headers.get(b"retry-after", b"")
        seconds = int(after) if after.isdigit() else 1
        return QueueFull("all replicas are busy; send the request later", retry_after=seconds)
    if start["status"] == 503:
        return NotReady("no replica takes requests; send this one later")
    if start["status"] == 408:
        return DeadlineExceeded("the request took longer than Ray waits; ask for less at once")
    return None


async def _refuse(error: ServeError, path: str, send: Send) -> None:
    body = error.body(path)
    headers = error.headers(len(body))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
