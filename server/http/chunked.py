"""Chunked bodies, read strictly: what two parsers could read differently is refused.

Takes the place of h11's own reader, which skips over whatever stands behind a chunk's size and
ends lines of trailers at a bare LF.
"""

import re
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

import h11

from ropewalk.server.errors import BadRequest, ServeError

# How much of a body may be extensions and trailers, which nothing here reads.
MAX_UNREAD = 16 << 10

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_EXTENSION = rb";%s(?:=(?:%s|%s))?" % (_TOKEN, _TOKEN, _QUOTED)
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:%s)*)\r\n" % _EXTENSION)
_TRAILER = re.compile(rb"%s:[\t\x20-\x7e\x80-\xff]*\r\n" % _TOKEN)


class Buffer(Protocol):
    """What of h11's receive buffer is used."""

    def __bytes__(self) -> bytes: ...

    def maybe_extract_next_line(self) -> bytearray | None: ...

    def maybe_extract_at_most(self, count: int) -> bytearray | None: ...


class ChunkedReader:
    """Takes a body's events out of h11's buffer; `refuse` is called with the first fault.

    All chunks that have arrived make one event, since an event costs more than a short chunk.
    """

    def __init__(self, refuse: Callable[[ServeError], NoReturn]) -> None:
        self._refuse = refuse
        self._left = 0  # bytes of the chunk that are still to come
        self._unread = 0  # bytes of extensions and trailers
        self._ended = False
        self._read_line = self._read_size  # for what the next line must be

    def __call__(self, buffer: Buffer) -> h11.Data | h11.EndOfMessage | None:
        data = b"".join(self._read_chunks(buffer))
        if data:
            return h11.Data(data=data)
        return h11.EndOfMessage() if self._ended else None

    def _read_chunks(self, buffer: Buffer) -> Iterator[bytearray]:
        while not self._ended:
            if self._left:
                data = buffer.maybe_extract_at_most(self._left)
                if data is None:
                    return
                self._left -= len(data)
                yield data
            else:
                line = buffer.maybe_extract_next_line()
                if line is None:
                    if b"\n" in bytes(buffer):  # without CR, and so no end of a line
                        self._refuse_malformed()
                    return
                self._read_line(bytes(line))

    def _read_size(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            self._refuse_malformed()
        self._count(match[2])
        self._left = int(match[1], 16)
        self._read_line = self._read_end if self._left else self._read_trailer

    def _read_end(self, line: bytes) -> None:
        if line != b"\r\n":
            self._refuse_malformed()
        self._read_line = self._read_size

    def _read_trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self._ended = True
        elif not _TRAILER.fullmatch(line):
            self._refuse_malformed()
        self._count(line)

    def _count(self, unread: bytes) -> None:
        self._unread += len(unread)
        if self._unread > MAX_UNREAD:
            self._refuse(
                BadRequest(
                    f"chunk extensions and trailers exceed {MAX_UNREAD} bytes; leave them out"
                )
            )

    def _refuse_malformed(self) -> NoReturn:
        self._refuse(
            BadRequest(
                "the chunked body is malformed; send each chunk's size in hexadecimal, and end "
                "each line with CRLF"
            )
        )
