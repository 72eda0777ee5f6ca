"""One HTTP exchange over one connection, with a limit to every wait. Knows no completions."""

import asyncio

from ropewalk.load_tests.client.http1 import BadResponse, ResponseReader

_MAX_BODY_BYTES = 64 << 20


class Answer(asyncio.Protocol):
    """Sends a request (`content`) and collects the body; `finished` is None or why it failed.

    A server that sends nothing for `idle_s` seconds has failed, whatever it sent before.
    """

    def __init__(self, content: bytes, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[str | None] = self._loop.create_future()
        self.reader = ResponseReader()
        self.body = b""
        self._content = content
        self._idle_s = idle_s
        self._heard = self._loop.time()
        self._watcher: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._heard = self._loop.time()
        self._watch()
        transport.write(self._content)

    def data_received(self, data: bytes) -> None:
        if self.finished.done():
            return
        self._heard = self._loop.time()
        try:
            self.take(self.reader.feed(data))
        except BadResponse as error:
            self.end(str(error))
        else:
            if self.reader.complete:
                self.end(self.verdict())

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished.done():
            return
        try:
            self.reader.close()
        except BadResponse as error:
            self.end(str(error))
        else:
            self.end(self.verdict())

    def end(self, error: str | None) -> None:
        """End the exchange, with the reason why it failed, or None."""
        if self._watcher is not None:
            self._watcher.cancel()
        if not self.finished.done():
            self.finished.set_result(error)

    def take(self, body: bytes) -> None:
        """Take body bytes as they arrive. Raises BadResponse."""
        self.body += body
        if len(self.body) > _MAX_BODY_BYTES:
            raise BadResponse(f"the answer exceeds {_MAX_BODY_BYTES} bytes")

    def verdict(self) -> str | None:
        """None for a good answer, else what is wrong with it; called once it is complete."""
        if self.reader.status == 200:
            return None
        return f"status {self.reader.status}: {self.body[:300].decode(errors='replace')}"

    def _watch(self) -> None:
        quiet = self._loop.time() - self._heard
        if quiet >= self._idle_s:
            self.end(f"the server sent nothing for {self._idle_s:g} s")
        else:
            self._watcher = self._loop.call_later(self._idle_s - quiet, self._watch)


async def exchange(host: str, port: int, answer: Answer, timeout_s: float) -> str | None:
    """Connect, wait for the end, disconnect; returns why it failed, or None. Raises nothing."""
    loop = asyncio.get_running_loop()
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(lambda: answer, host, port)
            return await answer.finished
    except TimeoutError:
        return f"no complete answer within {timeout_s:g} s"
    except OSError as error:
        return f"cannot connect: {error.strerror or error}"
    finally:
        answer.end(None)
        if transport is not None:
            transport.abort()  # close() would wait for a server that does not read
