"""Every error that somebody is told in one sentence, with its cause and what to do next.

CommandError             ends a command: `ropewalk: <message>`
└── UsageError
ServeError               answers a request: status, type, code, and a reason for the metrics
├── InvalidRequest       400 and other 4xx: what was sent
│   ├── InvalidField     400
│   │   ├── InvalidBody, DuplicateKey, UnknownField, MissingField, BadRequest
│   │   ├── UnsupportedField, ThreadsUnsupported
│   │   └── PromptTooLong
│   └── FormFailed 400, WrongOrigin 400, Unauthorized 401, OperatorRoutesOff 403,
│       ModelNotFound 404, RouteNotFound 404, SequenceNotFound 404, MethodNotAllowed 405,
│       ReceiveTimeout 408, ImpossibleOperation 409, SequenceBusy 409, BodyTooLarge 413,
│       UnsupportedMedia 415, WrongHost 421, HeadersTooLarge 431
├── QueueFull            429
│   └── QueueTime        429
├── RequestFailed        500: this request alone, inside the engine, which counts it
│   ├── NumericalError, CacheChanged
│   ├── InternalError    500: on the HTTP side
│   └── WeightsChanged   503
├── NotReady             503
│   └── ModelWithdrawn, ModelNotLoaded, ShuttingDown
└── DeadlineExceeded     504
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

MAX_MESSAGE = 500
MAX_QUOTED = 64
MAX_RETRY_AFTER = 60  # seconds; the openai package disregards longer advice
# How long a supervisor may take to start the server again: most of it goes into loading.
RESTART_SECONDS = 5

Headers = list[tuple[bytes, bytes]]
Extra = tuple[tuple[bytes, bytes], ...]
NO_RETRY: Extra = ((b"x-should-retry", b"false"),)  # clients would otherwise try three times
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class CommandError(Exception):
    """Printed as `ropewalk: <message>`; the process ends with `exit_code`."""

    exit_code = 1


class UsageError(CommandError):
    """A flag, an environment variable or an argument that cannot be used."""

    exit_code = 2


class ServeError(Exception):
    """An answer other than 200; `param` is the field at fault.

    `quotes`: the message may contain a client's text, which must not get into the log.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    # A metric's label, which groups codes; None for what the engine counts.
    reason: ClassVar[str | None] = "other"
    closes: ClassVar[bool] = False  # the connection
    extra_headers: Extra = ()
    details: ClassVar[Mapping[str, str]] = {}  # by which Anthropic's client knows what to do
    retry_after: int | None = None  # whole seconds until another try may succeed
    model: str | None = None  # whom it is about, where the body was not read

    def __init__(self, message: str, param: str | None = None, *, quotes: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.quotes = quotes

    def body(self, path: str = "") -> bytes:
        """In the form of the API at that path: Anthropic's below /v1/messages, else OpenAI's."""
        message = self.message
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 1] + "…"
        if re.match(r"/v1/messages([/?]|\Z)", path):
            other = "invalid_request_error" if self.status < 500 else "api_error"
            said = {"type": _MESSAGES_TYPES.get(self.status, other), "message": message}
            more = {"details": self.details} if self.details else {}
            return json.dumps({"type": "error", "error": said | more}).encode()
        fields = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": fields}).encode()

    def headers(self, length: int) -> Headers:
        """Of an answer whose body has `length` bytes."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(length).encode()),
            *self.extra_headers,
        ]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.closes:
            headers.append((b"connection", b"close"))
        return headers


class InvalidRequest(ServeError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"
    reason = "invalid_request"


class InvalidField(InvalidRequest):
    """`param` names it."""


class InvalidBody(InvalidField):
    """The body is not exactly one unambiguous JSON object."""

    code = "invalid_json"


class DuplicateKey(InvalidField):
    code = "duplicate_key"


class UnknownField(InvalidField):
    code = "unknown_parameter"


class MissingField(InvalidField):
    code = "missing_required_parameter"


class UnsupportedField(InvalidField):
    code = "unsupported_parameter"


class ThreadsUnsupported(UnsupportedField):
    """Of Anthropic's Messages. Its client then sends the whole conversation without a thread."""

    details: ClassVar[Mapping[str, str]] = {"error_code": "thread_unsupported_request"}


class PromptTooLong(InvalidField):
    code = "context_length_exceeded"
    reason = "context_length"


class FormFailed(InvalidRequest):
    """The answer cannot be followed any further through the form that the client gave it."""

    code = "form_failed"


class BadRequest(InvalidField):
    """Not HTTP as this server accepts it."""

    code = "bad_request"
    closes = True


class Unauthorized(InvalidRequest):
    status = 401
    code = "invalid_api_key"
    reason = "unauthorized"
    extra_headers = ((b"www-authenticate", b"Bearer"),)


class OperatorRoutesOff(InvalidRequest):
    """What changes the server's state, where that is not for whoever can send requests."""

    status = 403
    code = "operator_routes_off"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"
    reason = "model_not_found"


class RouteNotFound(InvalidRequest):
    status = 404
    code = "not_found"


class SequenceNotFound(InvalidRequest):
    """No sequence is kept under that id for this client."""

    status = 404
    code = "sequence_not_found"


class ImpossibleOperation(InvalidRequest):
    """The model's encoding, or how the sequence is stored, rules it out; the message says why."""

    status = 409
    code = "impossible_operation"


class SequenceBusy(InvalidRequest):
    status = 409
    code = "sequence_busy"


class MethodNotAllowed(InvalidRequest):
    """`allow` lists the route's methods, as in the Allow header."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.extra_headers = ((b"allow", allow.encode()),)


class ReceiveTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"
    closes = True


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"
    reason = "body_too_large"
    closes = True


class UnsupportedMedia(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class UnsupportedCoding(UnsupportedMedia):
    code = "unsupported_encoding"


class WrongHost(InvalidRequest):
    status = 421
    code = "wrong_host"


class WrongOrigin(InvalidRequest):
    """A browser asked whether a web page may send a request, and it may not."""

    code = "wrong_origin"


class HeadersTooLarge(InvalidRequest):
    status = 431
    code = "headers_too_large"
    closes = True


class QueueFull(ServeError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    reason = "queue_full"

    def __init__(self, message: str, *, retry_after: int = 1, model: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.model = model


class QueueTime(QueueFull):
    """The request would wait, or has waited, for longer than it may."""

    code = "queue_time"


class RequestFailed(ServeError):
    """This request alone failed inside the engine."""

    reason: ClassVar[str | None] = None
    extra_headers = NO_RETRY  # a request that failed once fails again


class NumericalError(RequestFailed):
    code = "numerical_error"


class CacheChanged(RequestFailed):
    """Cached entries that the answer depends on changed in memory; a retry starts afresh."""

    code = "cache_changed"
    extra_headers = ()


class WeightsChanged(RequestFailed):
    """The model's weights changed in memory while it computed the answer."""

    status = 503
    code = "weights_changed"
    closes = True
    extra_headers = ()
    retry_after = RESTART_SECONDS


class InternalError(RequestFailed):
    """The HTTP side failed on this request. Failures in the engine are counted there instead."""

    reason = "failed"


class NotReady(ServeError):
    """Another server may answer, or this one later."""

    status = 503
    code = "not_ready"
    closes = True
    retry_after: int | None = RESTART_SECONDS


class ModelWithdrawn(NotReady):
    """The model answers nothing any more: its weights have changed in memory."""

    code = "model_withdrawn"


class ModelNotLoaded(NotReady):
    """The model is one of this server's, but not in memory."""

    code = "model_not_loaded"
    closes = False

    def __init__(self, message: str, *, retry_after: int | None) -> None:
        """retry_after: None where another try soon would not help."""
        super().__init__(message, "model")
        self.retry_after = retry_after
        if retry_after is None:
            self.extra_headers = NO_RETRY


class ShuttingDown(NotReady):
    code = "shutting_down"
    reason = "shutting_down"

    def __init__(self, why: str | None = None, *, retry_after: int = RESTART_SECONDS) -> None:
        super().__init__(why or "the server is shutting down; send the request to another one")
        self.retry_after = retry_after


class DeadlineExceeded(ServeError):
    status = 504
    code = "deadline_exceeded"
    reason = "deadline"
    extra_headers = NO_RETRY  # it would take as long


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.75)), None)


def quoted(value: object) -> str:
    """A client's value made safe to show: short printable ASCII."""
    text = ascii(value[: MAX_QUOTED + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def _kinds(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    yield kind
    for more in kind.__subclasses__():
        yield from _kinds(more)


def error_codes() -> dict[int, list[str]]:
    """The codes of every status that is no success."""
    found: dict[int, set[str]] = {}
    for kind in _kinds(ServeError):
        found.setdefault(kind.status, set()).add(kind.code)
    return {status: sorted(codes) for status, codes in found.items()}


# Reasons and codes of all refusals: a closed set of metric labels.
REJECTIONS = tuple(
    sorted({(kind.reason, kind.code) for kind in _kinds(ServeError) if kind.reason is not None})
)
