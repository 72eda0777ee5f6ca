"""A conversation in the terminal with a running server, over its public HTTP API.

Knows the server only through its API, like any other client.
"""

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from server.errors import CommandError, UsageError
from server.terminal import counted

HELP = """\
in the conversation:
  /reset        forget the conversation so far
  /system TEXT  start over with this system message
  /quit         exit (as does Ctrl-D); Ctrl-C stops an answer"""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The server and the model to ask, and how."""

    url: str  # "http://127.0.0.1:8000", without /v1
    model: str | None  # None: the first one the server lists
    api_key: str | None = field(repr=False)
    system: str | None
    sampling: Mapping[str, float | int]  # fields of the request body
    timeout_s: float
    stats: bool


@dataclass(slots=True)
class Answer:
    """What has been streamed so far, and how fast."""

    text: str = ""
    finish: str | None = None
    tokens: int | None = None  # sent with the last chunk
    first_s: float | None = None  # until the first text
    total_s: float = 0.0


class Refused(CommandError):
    """The server answered with an error, whose text this is."""


class Client:
    """One request at a time, each on its own connection."""

    def __init__(self, options: ChatOptions) -> None:
        try:
            parts = urllib.parse.urlsplit(options.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError
            self._host, self._port = parts.hostname, parts.port
        except ValueError:
            raise UsageError(
                f"--url: {options.url!r} is not an http or https URL; write for example "
                "http://127.0.0.1:8000"
            ) from None
        self.options = options
        self._secure = parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def models(self) -> list[str]:
        with self._request("GET", "/v1/models", None) as response:
            return [entry["id"] for entry in json.loads(response.read())["data"]]

    def stream(self, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat completion. Closing the iterator ends the request."""
        with self._request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Refused(chunk["error"]["message"])
                yield chunk
            raise CommandError("the server broke off the answer; see its log")

    @contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.options.timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(_refusal(response.status, response.read()))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"no answer from {self.options.url} ({error or type(error).__name__}); start the "
                "server with ropewalk serve, or name another with --url"
            ) from error
        finally:
            connection.close()


class Chat:
    """The conversation so far; prints each answer as it streams."""

    def __init__(self, client: Client, model: str, out: TextIO) -> None:
        self._client = client
        self._model = model
        self._out = out
        self._system = client.options.system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self, system: str | None = None) -> None:
        self._system = system or self._system
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def say(self, text: str) -> Answer:
        """Ask, print the answer as it streams, remember both; a refused question is forgotten."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            answer.finish = "interrupted"
        except CommandError:
            self.messages.pop()
            raise
        finally:
            if answer.text and not answer.text.endswith("\n"):
                self._out.write("\n")
            self._out.flush()
        self.messages.append({"role": "assistant", "content": answer.text})
        if self._client.options.stats:
            self._out.write(f"({stats_line(answer)})\n")
        return answer

    def _stream(self, answer: Answer) -> None:
        body = {
            "model": self._model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._client.options.sampling,
        }
        start = time.monotonic()
        for chunk in self._client.stream(body):
            if usage := chunk.get("usage"):
                answer.tokens = usage["completion_tokens"]
            for entry in chunk["choices"]:
                answer.finish = entry.get("finish_reason") or answer.finish
                if piece := entry["delta"].get("content"):
                    answer.first_s = answer.first_s or time.monotonic() - start
                    answer.text += piece
                    self._out.write(printable(piece))
                    self._out.flush()
            answer.total_s = time.monotonic() - start


def converse(options: ChatOptions, question: str | None, lines: Iterator[str], out: TextIO) -> int:
    """Answer `question`, or each of `lines` until they end; returns the exit code."""
    client = Client(options)
    chat = Chat(client, options.model or _first_model(client), out)
    if question is not None:
        chat.say(question)
        return 0
    failed = False
    for line in lines:
        words = line.strip()
        if words in ("/quit", "/exit"):
            break
        if words.startswith("/"):
            out.write(_command(chat, words) + "\n")
        elif words:
            try:
                chat.say(words)
            except Refused as error:  # the conversation goes on
                failed = True
                out.write(f"{error}\n")
    return 1 if failed else 0


def terminal_lines() -> Iterator[str]:
    """What a person types, with line editing, until Ctrl-D or Ctrl-C on an empty line."""
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() editing and history; touches the terminal
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def printable(text: str) -> str:
    """Without control characters: a model's output must not control the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or letter.isprintable())


def stats_line(answer: Answer) -> str:
    """Tokens, time to the first, and tokens per second after it, as far as known."""
    told = [] if answer.tokens is None else [counted(answer.tokens, "token")]
    if answer.first_s is None or answer.tokens is None:
        told.append(str(answer.finish))
    if answer.first_s is not None:
        told.append(f"first after {answer.first_s * 1000:.0f} ms")
        after = answer.total_s - answer.first_s
        if answer.tokens and answer.tokens > 1 and after:
            told.append(f"{(answer.tokens - 1) / after:.1f} tokens/s")
    return ", ".join(told)


def _command(chat: Chat, words: str) -> str:
    name, _, rest = words.partition(" ")
    if name == "/reset":
        chat.reset()
        return "The conversation starts over."
    if name == "/system" and rest.strip():
        chat.reset(rest.strip())
        return "The conversation starts over with this system message."
    return HELP


def _first_model(client: Client) -> str:
    models = client.models()
    if not models:
        raise CommandError("the server lists no model; start it with ropewalk serve MODEL")
    return models[0]


def _refusal(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"the server answered {status}; is this a Ropewalk or OpenAI server?"
    key = "; give the key with --api-key or ROPEWALK_API_KEY" if status == 401 else ""
    return f"the server answered {status}: {message}{key}"
