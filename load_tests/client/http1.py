"""Parses an HTTP/1.1 response and its server-sent events from bytes split anywhere. No sockets.

The client shares its cores with the server it measures, so this does one search and one slice
per chunk and leaves JSON to its caller.
"""

from enum import Enum, auto

_MAX_LINE_BYTES = 65_536
_MAX_EVENT_BYTES = 1 << 20


class BadResponse(Exception):
    """The bytes are not an HTTP/1.1 response, or the connection closed in the middle of one."""


class _State(Enum):
    HEAD = auto()
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    LENGTH = auto()
    UNTIL_CLOSE = auto()
    COMPLETE = auto()


class ResponseReader:
    """One response: feed it what arrives; it returns the body without its framing."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}  # names in lower case
        self._state = _State.HEAD
        self._rest = b""
        self._left = 0  # bytes until the end of the current chunk, or of the body

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` adds. Raises BadResponse."""
        if self._rest:
            data = self._rest + data
        body: list[bytes] = []
        at = 0
        while at < len(data) and self._state is not _State.COMPLETE:
            if self._state in (_State.CHUNK, _State.LENGTH):
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._took(len(piece))
            elif self._state is _State.UNTIL_CLOSE:
                body.append(data[at:])
                at = len(data)
            else:
                following = self._line(data, at)
                if following is None:
                    break
                at = following
        self._rest = data[at:]
        return b"".join(body)

    def close(self) -> None:
        """The server closed the connection. Raises BadResponse when the answer is incomplete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.COMPLETE
        elif self._state is _State.HEAD:
            raise BadResponse("the server closed the connection before it answered")
        elif self._state is not _State.COMPLETE:
            raise BadResponse("the server closed the connection in the middle of its answer")

    def _took(self, count: int) -> None:
        self._left -= count
        if self._left == 0:
            chunked = self._state is _State.CHUNK
            self._state = _State.CHUNK_END if chunked else _State.COMPLETE

    def _line(self, data: bytes, at: int) -> int | None:
        """Consume a line (or the whole head) at `at`; returns the start of the next, or None."""
        mark = b"\r\n\r\n" if self._state is _State.HEAD else b"\r\n"
        end = data.find(mark, at)
        if end < 0:
            if len(data) - at > _MAX_LINE_BYTES:
                raise BadResponse(f"a header or chunk line exceeds {_MAX_LINE_BYTES} bytes")
            return None
        line = data[at:end]
        if self._state is _State.HEAD:
            self._head(line)
        elif self._state is _State.CHUNK_SIZE:
            self._chunk_size(line)
        elif self._state is _State.CHUNK_END:
            if line:
                raise BadResponse("a chunk is longer than it says")
            self._state = _State.CHUNK_SIZE
        elif not line:  # the empty line after the trailers
            self._state = _State.COMPLETE
        return end + len(mark)

    def _chunk_size(self, line: bytes) -> None:
        try:
            self._left = int(line.split(b";", 1)[0], 16)
        except ValueError:
            raise BadResponse(f"not a chunk size: {line[:40]!r}") from None
        self._state = _State.CHUNK if self._left else _State.TRAILER

    def _head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise BadResponse(f"not an HTTP/1.1 status line: {first[:80]!r}")
        status = int(parts[1])
        if status < 200:  # an interim response; the final head follows
            return
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._state = self._framing()

    def _framing(self) -> _State:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return _State.CHUNK_SIZE
        length = self.headers.get("content-length")
        if length is None:
            return _State.UNTIL_CLOSE
        if not length.isdigit():
            raise BadResponse(f"not a content length: {length[:40]!r}")
        self._left = int(length)
        return _State.LENGTH if self._left else _State.COMPLETE


class EventReader:
    """Server-sent events: feed it body bytes, and it returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Raises BadResponse for an event without an end."""
        data = self._rest + body
        if b"\r" in data:  # JSON never contains it, so the sender ends lines with CR LF
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise BadResponse(f"an event exceeds {_MAX_EVENT_BYTES} bytes")
        payloads = (_payload(event) for event in events)
        return [payload for payload in payloads if payload is not None]


def _payload(event: bytes) -> bytes | None:
    """The joined `data` fields; None for a comment or an event without data."""
    if b"\n" not in event:
        return _field(event)
    fields = [_field(line) for line in event.split(b"\n")]
    data = [field for field in fields if field is not None]
    return b"\n".join(data) if data else None


def _field(line: bytes) -> bytes | None:
    if line.startswith(b"data: "):
        return line[6:]
    return line[5:] if line.startswith(b"data:") else None
