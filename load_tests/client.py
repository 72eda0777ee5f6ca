"""One streamed completion over one connection, timed. Knows HTTP and the OpenAI wire format only.

A request has succeeded when the status is 200, no event reports an error, the stream ends as its
dialect says, and exactly the requested number of tokens was generated. Anything else is a failure
with a reason, because a stream cut short would otherwise improve every mean.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from load_tests.http1 import BadResponse, EventReader, ResponseReader

_DONE = b"[DONE]"
_KEPT_EVENTS = 3  # usage comes last, or last but one


class Unreachable(Exception):
    """The server did not answer a question asked before measuring."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server's `/v1/completions` differs from vLLM's."""

    name: str
    usage_option: bool  # `stream_options` asks for the usage chunk
    done_marker: bool  # the stream ends with [DONE]
    ignore_eos: bool  # the field is known
    token_ids: bool  # a prompt may be a list of token ids


DIALECTS: Mapping[str, Dialect] = {
    "openai": Dialect("openai", True, True, True, True),
    # `transformers serve` refuses unknown fields and ends its streams with the usage chunk.
    "transformers": Dialect("transformers", False, False, False, False),
}


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go and how to phrase them. `model` None leaves the choice to the server."""

    host: str
    port: int
    dialect: Dialect
    model: str | None = None
    ignore_eos: bool = True
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One request: `prompt_tokens` is how many tokens the prompt should have."""

    prompt: str | tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are `time.perf_counter` seconds."""

    intended: float  # when it should have been sent
    sent: float
    first: float  # first chunk with text
    ended: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Intended start to the first chunk with text."""
        return self.first - self.intended

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.ended - self.first) / (self.output_tokens - 1)


def split_base_url(url: str) -> tuple[str, int]:
    """Host and port of `http://host:port`, with or without `/v1`. Raises ValueError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname or parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(f"{url!r} is not a base URL such as http://127.0.0.1:8000")
    return parts.hostname, parts.port or 80


def encode_request(server: Server, method: str, path: str, body: object = None) -> bytes:
    """The bytes of one HTTP/1.1 request that closes its connection afterwards."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {server.host}:{server.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    if server.api_key is not None:
        lines.append(f"Authorization: Bearer {server.api_key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def completion_body(server: Server, request: Completion) -> dict[str, object]:
    """The greedy, streamed `/v1/completions` body in the server's dialect."""
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
    }
    if server.model is not None:
        body["model"] = server.model
    if server.dialect.usage_option:
        body["stream_options"] = {"include_usage": True}
    if server.dialect.ignore_eos and server.ignore_eos:
        body["ignore_eos"] = True
    return body


async def complete(server: Server, request: Completion, intended: float | None = None) -> Outcome:
    """Send one request and read its stream to the end. Failures are in the outcome."""
    body = completion_body(server, request)
    content = encode_request(server, "POST", "/v1/completions", body)
    sent = time.perf_counter()
    stream = _Stream(content, server.dialect, request.output_tokens)
    error = await _exchange(server, stream)
    ended = stream.last or time.perf_counter()
    return Outcome(
        intended=sent if intended is None else intended,
        sent=sent,
        # An answer without any text (say, one special token) is first seen when it ends.
        first=stream.first or ended,
        ended=ended,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        error=error,
    )


async def get_json(server: Server, path: str) -> Any:
    """The JSON answer to a GET. Raises Unreachable."""
    answer = _Answer(encode_request(server, "GET", path))
    error = await _exchange(server, answer)
    where = f"http://{server.host}:{server.port}{path}"
    if error is not None:
        raise Unreachable(f"{where}: {error}")
    try:
        return json.loads(answer.body)
    except ValueError:
        raise Unreachable(f"{where} did not answer with JSON; is this the right port?") from None


async def _exchange(server: Server, protocol: "_Answer") -> str | None:
    """Connect, wait for the end, close. The reason it failed, if it did."""
    loop = asyncio.get_running_loop()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(server.timeout_s):
            transport, _ = await loop.create_connection(lambda: protocol, server.host, server.port)
            return await protocol.finished
    except TimeoutError:
        return f"no complete answer within {server.timeout_s:g} s"
    except OSError as error:
        return f"cannot connect: {error.strerror or error}"
    finally:
        if transport is not None:
            transport.close()


class _Answer(asyncio.Protocol):
    """Sends one request and collects the body; `finished` holds None or the reason it failed."""

    def __init__(self, request: bytes) -> None:
        self.finished: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.body = b""
        self._request = request
        self._reader = ResponseReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            body = self._reader.feed(data)
        except BadResponse as error:
            self._end(str(error))
            return
        self._take(body)
        if self._reader.complete:
            self._end(self._verdict())

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished.done():
            return
        try:
            self._reader.close()
        except BadResponse as error:
            self._end(str(error))
        else:
            self._end(self._verdict())

    def _end(self, error: str | None) -> None:
        if not self.finished.done():
            self.finished.set_result(error)

    def _take(self, body: bytes) -> None:
        self.body += body

    def _verdict(self) -> str | None:
        """None for a good answer, else what is wrong with it."""
        if self._reader.status == 200:
            return None
        return f"status {self._reader.status}: {self.body[:300].decode(errors='replace')}"


class _Stream(_Answer):
    """A stream of completion chunks. Only chunks that matter are parsed."""

    def __init__(self, request: bytes, dialect: Dialect, output_tokens: int) -> None:
        super().__init__(request)
        self.first: float | None = None
        self.last: float | None = None
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._dialect = dialect
        self._wanted_tokens = output_tokens
        self._events = EventReader()
        self._tail: deque[bytes] = deque(maxlen=_KEPT_EVENTS)
        self._done = False
        self._error: str | None = None

    def _take(self, body: bytes) -> None:
        if self._reader.status != 200:
            super()._take(body)
            return
        payloads = self._events.feed(body)
        if payloads:
            self.last = time.perf_counter()
        for payload in payloads:
            if payload == _DONE:
                self._done = True
                continue
            if b'"error"' in payload and self._error is None:
                self._error = _reported_error(payload)
            if self.first is None and _has_text(payload):
                self.first = self.last
            self._tail.append(payload)

    def _verdict(self) -> str | None:
        refused = super()._verdict()
        if refused is not None:
            return refused
        if self._error is not None:
            return f"error in the stream: {self._error}"
        if self._dialect.done_marker and not self._done:
            return "the stream ended without [DONE]"
        usage = next((u for u in map(_usage, reversed(self._tail)) if u is not None), None)
        if usage is None:
            return "the stream ended without a usage chunk"
        self.prompt_tokens, self.output_tokens = usage
        if self.output_tokens != self._wanted_tokens:
            return f"{self.output_tokens} tokens instead of {self._wanted_tokens}"
        return None


def _parsed(payload: bytes) -> Mapping[str, Any]:
    try:
        chunk = json.loads(payload)
    except ValueError:
        return {"error": f"not JSON: {payload[:80]!r}"}
    return chunk if isinstance(chunk, dict) else {}


def _has_text(payload: bytes) -> bool:
    return any(choice.get("text") for choice in _parsed(payload).get("choices") or ())


def _usage(payload: bytes) -> tuple[int, int] | None:
    usage = _parsed(payload).get("usage")
    return (usage["prompt_tokens"], usage["completion_tokens"]) if usage else None


def _reported_error(payload: bytes) -> str | None:
    """The message of an error frame; None when the word only occurs in the text."""
    error = _parsed(payload).get("error")
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error) if error else None
