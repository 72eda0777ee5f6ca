"""One streamed completion over one connection, timed. Knows only HTTP and OpenAI's wire format.

A request has succeeded when the status is 200, no event reports an error, the stream ends as its
dialect says, and exactly the requested number of tokens was generated. Anything else is a failure
with a reason, because a stream cut short would otherwise improve every mean.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from ropewalk.load_tests.client.exchange import Answer, exchange
from ropewalk.load_tests.client.http1 import BadResponse, EventReader
from ropewalk.load_tests.common.types import Outcome, Request

_DONE = b"[DONE]"


class Unreachable(Exception):
    """The server did not answer a request made beside the load."""


# `transformers serve` refuses fields that vLLM has and prompts of token ids, and ends its streams
# with the usage chunk.
Dialect = Literal["openai", "transformers"]
DIALECTS: Sequence[Dialect] = get_args(Dialect)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go and how to phrase them. `model` None leaves the choice to the server."""

    host: str
    port: int
    model: str | None = None
    dialect: Dialect = "openai"
    ignore_eos: bool = True
    api_key: str | None = None
    timeout_s: float = 600.0  # for a whole answer
    idle_s: float = 120.0  # between two pieces of it

    @property
    def authority(self) -> str:
        """Host and port as URLs and the Host header have them, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """In the form of `--base-url`."""
        return f"http://{self.authority}"


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compared: a model on a server, and how its positions are computed."""

    label: str  # rope, t5:table
    server: Server
    encoding: str  # "" if the server does not report it
    setting: str = ""  # a bias form or key storage; "" for the server's own choice


def split_base_url(url: str) -> tuple[str, int]:
    """Host and port of `http://host:port`, with or without `/v1`. Raises ValueError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    wrong = f"{url!r} is not a base URL such as http://127.0.0.1:8000"
    if parts.scheme == "https" or parts.path.rstrip("/") not in ("", "/v1"):
        raise ValueError(
            f"{wrong}: only plain http without a path is spoken; give the address behind the proxy"
        )
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(wrong)
    try:
        return parts.hostname, 80 if parts.port is None else parts.port
    except ValueError:  # of a port that is no number, or too large
        raise ValueError(wrong) from None


async def complete(server: Server, request: Request, intended: float | None = None) -> Outcome:
    """Send one request and read its stream to the end. Failures are in the outcome."""
    content = encode_request(server, "POST", "/v1/completions", completion_body(server, request))
    stream = _Stream(content, server, request)
    sent = time.perf_counter()
    error = await exchange(server.host, server.port, stream, server.timeout_s)
    ended = time.perf_counter() if error is not None or stream.last is None else stream.last
    usage = stream.usage
    return Outcome(
        intended=sent if intended is None else intended,
        sent=sent,
        ended=ended,
        chunks=stream.chunks_until(ended) if error is None else tuple(stream.chunks),
        prompt_tokens=usage.prompt,
        output_tokens=usage.output,
        cached_tokens=usage.cached,
        left=stream.left,
        error=error,
    )


async def fetch(server: Server, method: str, path: str, body: object = None) -> bytes:
    """The body of an answer with status 200. Raises Unreachable."""
    answer = Answer(encode_request(server, method, path, body), server.idle_s)
    error = await exchange(server.host, server.port, answer, server.timeout_s)
    if error is not None:
        where = "" if "status" in error else "; start the server or correct the URL"
        raise Unreachable(f"{server.url}{path}: {error}{where}")
    return answer.body


async def get_json(server: Server, path: str) -> Any:
    """The JSON answer to a GET. Raises Unreachable."""
    try:
        return json.loads(await fetch(server, "GET", path))
    except ValueError:
        where = f"{server.url}{path}"
        raise Unreachable(f"{where} did not answer with JSON; is this the right port?") from None


def encode_request(server: Server, method: str, path: str, body: object = None) -> bytes:
    """The bytes of one HTTP/1.1 request that closes its connection afterwards."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {server.authority}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    if server.api_key is not None:
        lines.append(f"Authorization: Bearer {server.api_key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def completion_body(server: Server, request: Request) -> dict[str, object]:
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
    if server.dialect == "openai":
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if server.ignore_eos:
            body["ignore_eos"] = True
    return {**body, **request.extra}


class _Usage(NamedTuple):
    prompt: int = 0
    output: int = 0
    cached: int | None = None


class _Stream(Answer):
    """A stream of completion chunks, each with its time of arrival."""

    def __init__(self, content: bytes, server: Server, request: Request) -> None:
        super().__init__(content, server.idle_s)
        self.chunks: list[tuple[float, int]] = []
        self.last: float | None = None  # time of the latest event
        self.usage = _Usage()
        self.left = False
        self._dialect = server.dialect
        self._request = request
        self._events = EventReader()
        self._counted = False  # whether any usage was seen
        self._done = False

    def chunks_until(self, ended: float) -> tuple[tuple[float, int], ...]:
        """The chunks; an answer without text (say, one special token) counts as one at its end."""
        return tuple(self.chunks) or ((ended, self.usage.output),)

    def take(self, body: bytes) -> None:
        if self.reader.status != 200:
            super().take(body)
            return
        for payload in self._events.feed(body):
            if not self.left:
                self.last = time.perf_counter()
                self._event(payload)

    def verdict(self) -> str | None:
        if (refused := super().verdict()) is not None:
            return refused
        if self._dialect == "openai" and not self._done:
            return "the stream ended without [DONE]"
        if not self._counted:
            return "the stream ended without a usage chunk"
        if self.usage.output != self._request.output_tokens:
            return f"{self.usage.output} tokens instead of {self._request.output_tokens}"
        return None

    def _event(self, payload: bytes) -> None:
        if self._done:
            raise BadResponse("the stream went on after [DONE]")
        if payload == _DONE:
            self._done = True
            return
        has_text, usage = _read_chunk(payload)
        if usage is not None:
            self.usage = usage
            self._counted = True
        if has_text:
            self._text(usage)

    def _text(self, usage: _Usage | None) -> None:
        before = self.chunks[-1][1] if self.chunks else 0
        so_far = before + 1 if usage is None else usage.output
        self.chunks.append((self.last or 0.0, so_far))
        if len(self.chunks) == self._request.leaves_after:
            self.left = True
            self.usage = self.usage._replace(output=so_far)
            self.end(None)


def _read_chunk(payload: bytes) -> tuple[bool, _Usage | None]:
    """Whether a chunk has text, and its usage. Raises BadResponse, even for an error frame."""
    try:
        chunk = json.loads(payload)
        if error := chunk.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise BadResponse(f"error in the stream: {message}")
        has_text = any(choice.get("text") for choice in chunk.get("choices") or ())
        return has_text, _read_usage(chunk.get("usage"))
    # Raised by the parser, and by access to data of another shape.
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise BadResponse(f"not a completion chunk: {payload[:80]!r}") from None


def _read_usage(usage: Any) -> _Usage | None:
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return _Usage(
        int(usage["prompt_tokens"]),
        int(usage["completion_tokens"]),
        None if cached is None else int(cached),
    )
