"""Refuses new connections' requests from their bytes, while the door refuses every request.

Under overload most requests are refused, and to read each of them as HTTP and send it through the
application costs several times what a refusal needs. Only requests of the plainest kind, which
have arrived whole and can be read in one way, are refused here, and their connections closed. All
others take the usual way, at the end of which the same door refuses them.
"""

import re
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus

from starlette.types import Scope

from ropewalk.server.errors import ServeError
from ropewalk.server.http.access_log import Exchange, HttpLog, choose_id
from ropewalk.server.http.streaming import Drain
from ropewalk.server.scheduling.queue import Door

_MAX_HEAD = 4 << 10
_HEAD = re.compile(
    rb"POST (/v1/(?:completions|chat/completions|responses|messages)) HTTP/1\.1\r\n"
    rb"((?:[a-z0-9-]+:[ \t]*[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?\r\n)+)\r\n",
    re.IGNORECASE,
)
# They say how the body is framed, or ask for more than an answer.
_SPECIAL = frozenset((b"transfer-encoding", b"trailer", b"expect", b"upgrade", b"origin"))


class Shedder:
    """Answers a whole request, given as bytes, if the door refuses it. For one event loop."""

    def __init__(
        self, door: Door, drain: Drain, identify: Callable[[Scope], str], log: HttpLog
    ) -> None:
        """`identify` returns the client of a request with these headers, or raises ServeError."""
        self._door = door
        self._drain = drain
        self._identify = identify
        self._log = log

    @property
    def active(self) -> bool:
        """Whether the last one who asked was refused, for want of room alone."""
        return self._door.refuses and not self._drain.draining

    def answer(self, data: bytes, address: str) -> bytes | None:
        """The answer to send before the connection is closed; None: it is to be read as usual."""
        began = time.perf_counter()
        read = _read(data)
        if read is None:
            return None
        path, headers = read
        try:
            client = self._identify({"headers": list(headers.items())})
        except ServeError:
            return None
        error = self._door.refusal(client)
        if error is None:
            return None
        body = error.body(path)
        request_id = choose_id(headers.get(b"x-request-id"))
        seconds = time.perf_counter() - began
        status = error.status
        self._log.refused(
            Exchange(request_id, address, "POST", path, path, status, seconds, len(body)), error
        )
        lines = [
            b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()),
            b"date: " + formatdate(usegmt=True).encode(),
            *(b"%s: %s" % header for header in error.headers(len(body))),
            b"x-request-id: " + request_id.encode(),
            b"connection: close",
        ]
        return b"\r\n".join([*lines, b"", body])


def _read(data: bytes) -> tuple[str, dict[bytes, bytes]] | None:
    """Path and headers of a plain request that `data` is, wholly and alone."""
    end = data.find(b"\r\n\r\n", 0, _MAX_HEAD)
    found = _HEAD.fullmatch(data, 0, end + 4) if end > 0 else None
    if found is None:
        return None
    lines = [line.partition(b":") for line in found[2].split(b"\r\n")[:-1]]
    headers = {name.lower(): value.strip() for name, _, value in lines}
    if len(headers) < len(lines) or b"host" not in headers or headers.keys() & _SPECIAL:
        return None
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or len(length) > 9 or int(length) != len(data) - end - 4:
        return None
    return found[1].decode(), headers
