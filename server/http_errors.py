"""Errors that exist only on the HTTP side, and how every error looks to a client.

The rest of the hierarchy is in server/scheduling/request.py. Independent of the framework: the
application, the middleware and the protocol all write their refusals with these functions.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ropewalk.server.scheduling.request import (
    RESTART_SECONDS,
    CacheChanged,
    InvalidField,
    ModelNotFound,
    RequestFailed,
    ServeError,
)

MAX_MESSAGE = 500
MAX_QUOTED = 64

Headers = list[tuple[bytes, bytes]]


class InvalidBody(InvalidField):
    """The body is not exactly one unambiguous JSON object."""

    code = "invalid_json"


class DuplicateKey(InvalidField):
    code = "duplicate_key"


class UnknownField(InvalidField):
    code = "unknown_parameter"


class MissingField(InvalidField):
    code = "missing_required_parameter"


class Unauthorized(ServeError):
    status = 401
    code = "invalid_api_key"


class RouteNotFound(ServeError):
    status = 404
    code = "not_found"


class MethodNotAllowed(ServeError):
    """`allow` lists the route's methods, as in the Allow header."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ReceiveTimeout(ServeError):
    status = 408
    code = "request_timeout"


class BodyTooLarge(ServeError):
    status = 413
    code = "body_too_large"


class UnsupportedMedia(ServeError):
    status = 415
    code = "unsupported_media_type"


class UnsupportedCoding(UnsupportedMedia):
    code = "unsupported_encoding"


class WrongHost(ServeError):
    status = 421
    code = "wrong_host"


class WrongOrigin(ServeError):
    """A browser asked whether a web page may send a request, and it may not."""

    status = 400
    code = "wrong_origin"


class HeadersTooLarge(ServeError):
    status = 431
    code = "headers_too_large"


class BadRequest(InvalidField):
    """Not HTTP as this server accepts it."""

    code = "bad_request"


class DeadlineExceeded(ServeError):
    status = 504
    code = "deadline_exceeded"


class InternalError(RequestFailed):
    """The HTTP side failed on this request. Failures in the engine are counted there instead."""


class NotReady(ServeError):
    status = 503
    code = "not_ready"
    retry_after = RESTART_SECONDS


def quoted(value: object) -> str:
    """A client's value made safe to show: short printable ASCII."""
    text = ascii(value[: MAX_QUOTED + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def error_body(error: ServeError) -> dict[str, Any]:
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    return {
        "error": {
            "message": message,
            "type": _kind(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def _kind(status: int) -> str:
    """OpenAI's type of an error."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_bytes(error: ServeError) -> bytes:
    return json.dumps(error_body(error)).encode()


def error_headers(error: ServeError, length: int) -> Headers:
    """Headers of an error answer whose body has `length` bytes."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status in (408, 413, 431, 503) or isinstance(error, BadRequest):
        headers.append((b"connection", b"close"))
    if error.status == 500 and not isinstance(error, CacheChanged):
        # A request that failed once fails again, and clients would otherwise send it three times.
        headers.append((b"x-should-retry", b"false"))
    return headers


_REASONS: Mapping[type[ServeError], str] = {
    BodyTooLarge: "body_too_large",
    DeadlineExceeded: "deadline",
    ModelNotFound: "model_not_found",
    InternalError: "failed",
    Unauthorized: "unauthorized",
}
_REASONS_BY_CODE = {
    "context_length_exceeded": "context_length",
    "queue_full": "queue_full",
    "queue_time": "queue_full",
    "shutting_down": "shutting_down",
}


def rejection(kind: type[ServeError]) -> tuple[str, str] | None:
    """Reason and code of a refusal, from a closed set: metric labels. The reason groups codes.

    None for failures inside the engine, which are counted there.
    """
    if issubclass(kind, RequestFailed) and not issubclass(kind, InternalError):
        return None
    reason = _REASONS.get(kind) or _REASONS_BY_CODE.get(kind.code)
    if reason is None:
        reason = "invalid_request" if 400 <= kind.status < 500 else "other"
    return reason, kind.code


def _kinds(kind: type[ServeError]) -> Iterator[type[ServeError]]:
    yield kind
    for more in kind.__subclasses__():
        yield from _kinds(more)


REJECTIONS = tuple(sorted({found for kind in _kinds(ServeError) if (found := rejection(kind))}))
