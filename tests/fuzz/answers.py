"""Whether what a server sent is right, whatever it was sent: the oracle of all kinds."""

import json
import re
from dataclasses import dataclass

from tests.fuzz.streams import Ending, Exchange, Stream

MESSAGES = b"/v1/messages"
# What a stream may end with.
_TRANSLATED = {
    MESSAGES: ("message_stop", "error"),
    b"/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
}
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [A-Za-z -]+\r\n")


class Malformed(Exception):
    """It is no sequence of whole HTTP answers."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def read_answers(raw: bytes) -> list[Answer]:
    """All final answers in `raw`. Raises Malformed."""
    found = []
    while raw:
        answer, raw = _read_one(raw)
        if answer.status >= 200:
            found.append(answer)
    return found


def _read_one(raw: bytes) -> tuple[Answer, bytes]:
    match = _STATUS.match(raw)
    if match is None:
        raise Malformed(f"no status line: {raw[:60]!r}")
    head, blank, rest = raw.partition(b"\r\n\r\n")
    if not blank:
        raise Malformed(f"an unfinished head: {head[-60:]!r}")
    lines = head.decode("latin-1").split("\r\n")[1:]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    status = int(match[1])
    if status < 200 or not rest or _STATUS.match(rest):  # none, as of HEAD
        return Answer(status, headers, b""), rest
    if headers.get("transfer-encoding") == "chunked":
        body, rest = _dechunked(rest)
    else:
        length = int(headers["content-length"])
        if len(rest) < length:
            raise Malformed(f"{length - len(rest)} bytes of a body are missing")
        body, rest = rest[:length], rest[length:]
    return Answer(status, headers, body), rest


def _dechunked(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, line, rest = rest.partition(b"\r\n")
        length = int(size, 16) if line else 0
        if not line or len(rest) < length + 2:
            raise Malformed("a chunked body ends early")
        body, rest = body + rest[:length], rest[length + 2 :]
        if not length:
            return body, rest


def fault(stream: Stream, got: Exchange) -> str | None:
    """What is wrong with the server's side of an exchange, None if nothing."""
    if got.hung:
        return "hang"
    if stream.ending in (Ending.CLOSE, Ending.RESET):
        return None
    try:
        answers = read_answers(got.raw)
    except Malformed as error:
        return f"malformed answer: {error}" if got.whole else None
    if not answers and got.whole and stream.ending is Ending.WAIT and stream.data:
        return "closed without an answer"
    path = next((each for each in _TRANSLATED if b" " + each in stream.data), b"")
    return next((wrong for answer in answers if (wrong := _wrong(answer, path))), None)


def _wrong(answer: Answer, path: bytes) -> str | None:
    """`path`: one of _TRANSLATED that was asked; empty for OpenAI's other routes."""
    if answer.status >= 500:
        return f"{answer.status}: {answer.body[:200]!r}"
    if "x-request-id" not in answer.headers:
        return f"{answer.status} without an id"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _wrong_named(answer.body, path) if path else _wrong_events(answer.body)
    if not answer.body or answer.status < 400:
        return None
    try:
        return _wrong_error(json.loads(answer.body), path)
    except ValueError:
        return f"{answer.status} that is not JSON: {answer.body[:100]!r}"


def _wrong_error(body: object, path: bytes = b"") -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    own = {"message", "type"} if path == MESSAGES else {"message", "type", "param", "code"}
    if not isinstance(error, dict) or set(error) != own:
        return f"a refusal without its cause: {body!r}"
    message, code = error["message"], error.get("code", error["type"])
    if not isinstance(message, str) or not 10 < len(message) <= 500 or not isinstance(code, str):
        return f"a refusal without its cause: {error!r}"
    return None


def _wrong_events(body: bytes) -> str | None:
    events = [each for each in body.split(b"\n\n") if each and not each.startswith(b":")]
    if not events or not all(each.startswith(b"data: ") for each in events):
        return f"a stream with other lines than data: {body[:200]!r}"
    if events[-1] == b"data: [DONE]":
        return None
    last = json.loads(events[-1].removeprefix(b"data: "))
    return _wrong_error(last) if "error" in last else "a stream without an end"


def _wrong_named(body: bytes, path: bytes) -> str | None:
    """Of a stream whose events have names, which their data repeat."""
    kinds = []
    for each in body.split(b"\n\n"):
        if each and not each.startswith(b":"):
            name, _, data = each.partition(b"\ndata: ")
            kinds.append(json.loads(data or b"{}").get("type"))
            if name != f"event: {kinds[-1]}".encode():
                return f"an event without its name: {each[:200]!r}"
    return None if kinds and kinds[-1] in _TRANSLATED[path] else "a stream without an end"
