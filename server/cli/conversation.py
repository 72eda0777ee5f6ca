"""A conversation in the terminal with a running server, over its public HTTP API.

Knows the server only through its API, like any other client.
"""

import http.client
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ropewalk.server.cli.connect import Address, connected
from ropewalk.server.cli.printing import Printed, print_line, printable
from ropewalk.server.errors import CommandError, nearest
from ropewalk.server.terminal import counted

HELP = """\
in the conversation:
  /reset        forget the conversation so far
  /system TEXT  start over with this system message
  /help         show this
  /quit         exit, as does Ctrl-D
Ctrl-C stops an answer or clears the line, and exits when the line is empty."""

LEAVE = ("/quit", "/exit")
USUAL_TOKENS = 512  # the longest answer, where none is asked for and it fits


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The server and the model to ask, and how."""

    server: Address
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
    first_s: float | None = None  # until the first text, or thought
    total_s: float = 0.0


class Refused(CommandError):
    """The server answered with an error, whose text this is."""


class TooLong(Refused):
    """Prompt and answer do not fit the context."""


class Client:
    """One request at a time, each on its own connection."""

    def __init__(self, options: ChatOptions) -> None:
        self.options = options

    def first_model(self) -> str:
        """The first that can chat, if possible of those that are loaded. Raises CommandError."""
        with self._request("GET", "/v1/models", None) as response:
            entries = json.loads(response.read())["data"]
        if not entries:
            raise CommandError("the server lists no model; start it with ropewalk serve MODEL")
        able = [entry for entry in entries if entry.get("chat", True)]
        if not able:
            raise CommandError(
                "no model of the server has a chat template; send a text to /v1/completions, or "
                "start it with one that has, as ropewalk serve smollm2"
            )
        first = min(able, key=lambda entry: entry.get("status") == {"value": "unloaded"})
        return str(first["id"])

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
                    raise Refused(printable(chunk["error"]["message"]))
                yield chunk
            raise CommandError("the server broke off the answer; see its log")

    @contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        server = self.options.server
        with connected(server, self.options.timeout_s) as connection:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, server.prefix + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read())
            yield response


class Chat:
    """The conversation so far; prints each answer as it streams."""

    def __init__(self, client: Client, model: str, out: TextIO) -> None:
        self._client = client
        self.model = model
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
        printed = Printed(self._out)
        try:
            self._stream(answer, printed)
        except KeyboardInterrupt:
            answer.finish = "interrupted"
        except CommandError:
            self.messages.pop()
            raise
        finally:
            printed.end()
        self.messages.append({"role": "assistant", "content": answer.text})
        if answer.finish == "length":
            print("(cut off: --max-tokens or the context allows no more)", file=sys.stderr)
        if self._client.options.stats:
            print_line(f"({stats_line(answer)})", self._out)
        return answer

    def _stream(self, answer: Answer, printed: Printed) -> None:
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": USUAL_TOKENS,
            **self._client.options.sampling,
        }
        start = time.monotonic()
        for chunk in self._chunks(body):
            if usage := chunk.get("usage"):
                answer.tokens = usage["completion_tokens"]
            for entry in chunk["choices"]:
                answer.finish = entry.get("finish_reason") or answer.finish
                thought = entry["delta"].get("reasoning_content")
                piece = entry["delta"].get("content")
                if thought or piece:
                    answer.first_s = answer.first_s or time.monotonic() - start
                if thought:
                    printed.add(thought, faint=True)
                if piece:
                    answer.text += piece
                    printed.add(piece)
            answer.total_s = time.monotonic() - start

    def _chunks(self, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        try:
            yield from self._client.stream(body)
        except TooLong:
            if "max_tokens" in self._client.options.sampling:
                raise
            rest = {name: value for name, value in body.items() if name != "max_tokens"}
            yield from self._client.stream(rest)


def ask(options: ChatOptions, question: str, out: TextIO) -> int:
    """Print the answer to one question; returns the exit code."""
    _chat(options, out).say(question)
    return 0


def converse(options: ChatOptions, lines: Iterator[str], out: TextIO, *, greet: bool) -> int:
    """Answer each of `lines` until they end; returns the exit code."""
    chat = _chat(options, out)
    if greet:
        at = options.server.url
        print_line(f"{chat.model} at {at}; /help lists commands, Ctrl-D leaves", out)
    failed = False
    for line in lines:
        words = line.strip()
        if words in LEAVE:
            break
        if words.startswith("/"):
            print_line(_command(chat, words), out)
        elif words:
            try:
                chat.say(words)
            except Refused as error:  # the conversation goes on
                failed = True
                print_line(str(error), out)
    return 1 if failed else 0


def _chat(options: ChatOptions, out: TextIO) -> Chat:
    client = Client(options)
    return Chat(client, options.model or client.first_model(), out)


def typed_lines(history: Path) -> Iterator[str]:
    """What a person types, until Ctrl-D, or Ctrl-C on an empty line.

    With line editing, and the lines of earlier conversations from the file `history`.
    """
    # Late: it takes 0.15 s, and only a conversation in a terminal needs it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError)

    class Lossy(FileHistory):
        """On a full disk the line counts and the file lacks it."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    kept: History = Lossy(str(history)) if _made_private(history) else InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=kept, key_bindings=keys)
    while True:
        try:
            yield session.prompt("> ")
        except (EOFError, KeyboardInterrupt):
            return


def _made_private(file: Path) -> bool:
    """Makes the file, which only its owner may read; False where none can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        file.chmod(0o600)
    except OSError:
        return False
    return True


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
    if name == "/system":
        if not rest.strip():
            return "Write the system message after it: /system TEXT"
        chat.reset(rest.strip())
        return "The conversation starts over with this system message."
    if name == "/help":
        return HELP
    known = ("/reset", "/system", "/help", *LEAVE)
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else "/help lists the commands."
    return f"{name} is not a command; {hint}"


def _refusal(status: int, body: bytes) -> Refused:
    try:
        error = json.loads(body)["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError):
        return Refused(f"the server answered {status}; is this a Ropewalk or OpenAI server?")
    key = "; give the key with --api-key or ROPEWALK_API_KEY" if status == 401 else ""
    kind = TooLong if code == "context_length_exceeded" else Refused
    return kind(f"the server answered {status}: {printable(message)}{key}")
