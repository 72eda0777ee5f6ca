"""What a client sends on one connection and how, and what it gets. Knows no HTTP."""

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Longer than any answer takes, on a busy machine.
HANG_SECONDS = 60.0


class Ending(StrEnum):
    WAIT = "wait"  # until the server closes the connection
    HALF = "half"  # close the own side, then wait
    CLOSE = "close"  # read nothing
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Stream:
    """Parts with a pause, in seconds, before each."""

    parts: tuple[tuple[float, bytes], ...]
    ending: Ending = Ending.WAIT

    @property
    def data(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        parts = [[pause, data.decode("latin-1")] for pause, data in self.parts]
        return {"parts": parts, "ending": self.ending.value}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Stream":
        parts = tuple((pause, data.encode("latin-1")) for pause, data in plain["parts"])
        return cls(parts, Ending(plain["ending"]))


@dataclass(frozen=True, slots=True)
class Exchange:
    """`raw` is everything the server sent. `whole`: it then closed the connection in order."""

    raw: bytes
    whole: bool
    hung: bool
    seconds: float


async def exchange(address: tuple[str, int], stream: Stream, source: str | None = None) -> Exchange:
    """`source` is the address to come from; None: any."""
    local = None if source is None else (source, 0)
    reader, writer = await asyncio.open_connection(*address, local_addr=local)
    began = time.monotonic()
    raw, whole, hung = bytearray(), False, False
    try:
        async with asyncio.timeout(HANG_SECONDS):
            # A server may well close before all is sent.
            with contextlib.suppress(OSError):
                await _send(writer, stream)
            if stream.ending in (Ending.WAIT, Ending.HALF):
                with contextlib.suppress(ConnectionError):
                    while more := await reader.read(1 << 16):
                        raw += more
                    whole = True
    except TimeoutError:
        hung = True
    finally:
        writer.transport.abort() if hung else writer.close()
    return Exchange(bytes(raw), whole, hung, time.monotonic() - began)


async def _send(writer: asyncio.StreamWriter, stream: Stream) -> None:
    for pause, part in stream.parts:
        if pause:
            await asyncio.sleep(pause)
        writer.write(part)
        await writer.drain()
    if stream.ending is Ending.HALF:
        writer.write_eof()
    elif stream.ending is Ending.RESET:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
