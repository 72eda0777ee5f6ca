"""A small completions server for the tests of the client: scripted answers, no model.

`serving(answer)` runs one in a thread; `python -m tests.load_tests.sse_server PORT` a good one.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Pieces = Sequence[bytes | float]  # a number is seconds of silence
Answer = Callable[[str, dict], Pieces]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = {"object": "list", "data": [{"id": "tiny", "vocab_size": 1000}, {"id": "other"}]}


@dataclass
class Running:
    port: int = 0
    bodies: list[dict] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    connections: dict[asyncio.Task, asyncio.WriteTransport] = field(default_factory=dict)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return f"data: {text}\n\n".encode()


def text_event(text: str, usage: dict | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": usage})


def counts(prompt: int, completion: int) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def usage_event(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts(prompt, completion) | details})


def stream(events: Sequence[bytes]) -> list[bytes]:
    """A whole chunked answer: the head, a chunk per event, the last chunk."""
    return [HEAD, *(chunk(data) for data in events), b"0\r\n\r\n"]


def whole(status: str, body: object) -> list[bytes]:
    return _answer(status, json.dumps(body).encode())


def _answer(status: str, content: bytes) -> list[bytes]:
    return [b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(content)), content]


def prompt_length(body: dict) -> int:
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def good(path: str, body: dict) -> Pieces:
    """A well-behaved server's answer to any request of the benchmark."""
    if path == "/v1/models":
        return whole("200 OK", MODELS)
    if path == "/health":
        return _answer("200 OK", b"")  # as vLLM does
    if path != "/v1/completions":
        return whole("404 Not Found", {"error": {"message": f"no {path}"}})
    count = body["max_tokens"]
    events = [text_event(f" {index}") for index in range(count)]
    return stream([*events, usage_event(prompt_length(body), count), event("[DONE]")])


@contextmanager
def serving(answer: Answer = good, pause_s: float = 0.0) -> Iterator[Running]:
    """A server in a thread of its own, gone afterwards; `pause_s` between the pieces."""
    running = Running()
    started = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        server = await asyncio.start_server(_handler(answer, pause_s, running), "127.0.0.1", 0)
        running.port = server.sockets[0].getsockname()[1]
        started.set()
        await stopping.wait()
        for _ in range(3):  # accept, transport, handler: closed between them, a socket stays open
            await asyncio.sleep(0)
        server.close()
        for connection, transport in running.connections.items():
            transport.abort()  # a task cancelled before its first step closes nothing
            connection.cancel()
        await asyncio.gather(*running.connections, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait()
    try:
        yield running
    finally:
        stop[0]()
        thread.join()


def _handler(answer: Answer, pause_s: float, running: Running):
    def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(converse(reader, writer))
        running.connections[connection] = writer.transport
        connection.add_done_callback(running.connections.pop)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path, body = await _request(reader, running)
            await respond(answer(path, body), writer)
        except (ConnectionError, asyncio.IncompleteReadError):  # the client gave up first
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def respond(pieces: Pieces, writer: asyncio.StreamWriter) -> None:
        running.in_flight += 1
        running.most_in_flight = max(running.most_in_flight, running.in_flight)
        try:
            for piece in pieces:
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                    continue
                writer.write(piece)
                await writer.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            running.in_flight -= 1

    return handle


async def _request(reader: asyncio.StreamReader, running: Running) -> tuple[str, dict]:
    """Its path and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        int(line.split(":")[1])
        for line in head.split("\r\n")
        if line.lower().startswith("content-length:")
    )
    content = await reader.readexactly(length)
    path = head.split(" ")[1]
    body = json.loads(content) if content else {}
    if path == "/v1/completions":
        running.bodies.append(body)
        running.heads.append(head)
    return path, body


async def _forever(port: int) -> None:
    server = await asyncio.start_server(_handler(good, 0.0, Running()), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(_forever(int(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(0)
