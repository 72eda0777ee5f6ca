"""What it costs a server that answers 32 streams when pages watch its cache.

python -m ropewalk.load_tests.micro.watching_cost [MODEL] [--rounds N] [--seconds S] [--watchers N]

One server of its own answers 32 clients without a pause. In every round its throughput is read
twice from its own counter, once while five clients listen to /v1/cache/stream and once while none
does, in an order that changes. Clients and server share the machine, so what reading the streams
takes counts too. The ratio of each round says what watching costs; asked for is less than 1 %.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from ropewalk.load_tests.client.client import DIALECTS, Server, fetch
from ropewalk.load_tests.client.process import HOST, free_port, start
from ropewalk.report.statistics import median_of

_GENERATED = re.compile(rb"^ropewalk_generated_tokens_total\{.*\} (\S+)$", re.MULTILINE)
SETTLING_S = 0.5


async def read_on(server: Server, head: str, body: bytes = b"") -> int:
    """Send a request and read its answer to the end; returns how many bytes it had."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        length = f"content-length: {len(body)}\r\ncontent-type: application/json\r\n"
        fields = f"host: {server.host}\r\nconnection: close\r\n{length if body else ''}"
        writer.write(f"{head} HTTP/1.1\r\n{fields}\r\n".encode() + body)
        count = 0
        while data := await reader.read(1 << 16):
            count += len(data)
        return count
    finally:
        writer.close()


async def answered(server: Server, number: int, tokens: int) -> None:
    """One client after another, each with a prompt of its own."""
    draw = random.Random(number)
    while True:
        ids = draw.choices(range(100, 4000), k=64 + number)
        body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        await read_on(server, "POST /v1/completions", json.dumps(body).encode())


@asynccontextmanager
async def beside(*works: "asyncio.Task[object]") -> AsyncIterator[None]:
    try:
        yield
    finally:
        for work in works:
            work.cancel()
        for work in works:
            with suppress(asyncio.CancelledError):
                await work


async def generated(server: Server) -> float:
    found = _GENERATED.search(await fetch(server, "GET", "/metrics"))
    assert found is not None, "a server that serves counts its tokens"
    return float(found[1])


async def throughput(server: Server, seconds: float, watchers: int) -> float:
    """Tokens per second while so many watch."""
    loop = asyncio.get_running_loop()
    watching = [
        asyncio.ensure_future(read_on(server, "GET /v1/cache/stream")) for _ in range(watchers)
    ]
    async with beside(*watching):
        await asyncio.sleep(SETTLING_S)
        before, began = await generated(server), loop.time()
        await asyncio.sleep(seconds)
        return (await generated(server) - before) / (loop.time() - began)


async def compare(
    server: Server, rounds: int, seconds: float, watchers: int, clients: int, tokens: int
) -> list[tuple[float, float]]:
    """Throughput without and with watchers, of each round."""
    works = [asyncio.ensure_future(answered(server, number, tokens)) for number in range(clients)]
    found = []
    async with beside(*works):
        await asyncio.sleep(5)  # prompts, and what begins slowly
        for number in range(rounds):
            order = (0, watchers) if number % 2 else (watchers, 0)
            taken = {count: await throughput(server, seconds, count) for count in order}
            found.append((taken[0], taken[watchers]))
    return found


async def measured(args: argparse.Namespace) -> Sequence[tuple[float, float]]:
    server = Server(HOST, free_port(), DIALECTS["openai"])
    words = [sys.executable, "-m", "ropewalk", "serve", args.model, "--port", str(server.port)]
    words += ["--max-seqs", str(args.clients), "--no-access-log"]
    with tempfile.TemporaryDirectory() as folder:
        process = start("the server", words, Path(folder) / "log")
        try:
            await process.answers(server)
            return await compare(
                server, args.rounds, args.seconds, args.watchers, args.clients, args.tokens
            )
        finally:
            process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--watchers", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    args = parser.parse_args()
    found = asyncio.run(measured(args))
    more = median_of([watched / alone - 1 for alone, watched in found])
    alone = median_of([alone for alone, _ in found])
    print(
        f"{args.clients} clients, {args.watchers} watchers, {args.rounds} rounds: "
        f"{alone.value:.0f} tokens per second; watched {more.value:+.2%} "
        f"({more.low:+.2%} to {more.high:+.2%})"
    )


if __name__ == "__main__":
    main()
