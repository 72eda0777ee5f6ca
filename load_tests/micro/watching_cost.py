"""What it costs a server that answers 32 streams when pages watch its cache.

python -m ropewalk.load_tests.micro.watching_cost [MODEL] [--rounds N] [--seconds S] [--watchers N]

A server of its own answers 32 clients without a pause. In every round its throughput is read twice
from its own counter, once while five clients listen to /v1/cache/stream and once while none does,
in an order that changes. So is the processor time that the server takes for each token, which other
programs change less; with one thread that computes, none of it is spent waiting. Clients and server
share the machine, so what reading the streams takes counts in the throughput. The ratios of the
rounds say what watching costs; asked for is less than 1 % of throughput.
"""

import argparse
import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from ropewalk.load_tests.client.client import Server, fetch
from ropewalk.load_tests.client.process import ServerProcess, processor_s
from ropewalk.load_tests.run.serving import serve_alone
from ropewalk.report.statistics import median_of

_GENERATED = re.compile(rb"^ropewalk_generated_tokens_total\{.*\} (\S+)$", re.MULTILINE)
WARM_S, SETTLING_S = 10.0, 0.5  # prompts, and what begins slowly


async def answered(server: Server, number: int, tokens: int) -> None:
    """One client after another, each with a prompt of its own."""
    draw = random.Random(number)
    while True:
        ids = draw.choices(range(100, 4000), k=64 + number)
        body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        await fetch(server, "POST", "/v1/completions", body)


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


class Rate(NamedTuple):
    tokens: float  # per second
    busy: float  # seconds of processors per token


async def rate(server: Server, process: ServerProcess, seconds: float, watchers: int) -> Rate:
    """While so many watch."""
    loop, pid = asyncio.get_running_loop(), process.popen.pid
    watching = [
        asyncio.ensure_future(fetch(server, "GET", "/v1/cache/stream")) for _ in range(watchers)
    ]
    async with beside(*watching):
        await asyncio.sleep(SETTLING_S)
        before, busy, began = await generated(server), processor_s(pid), loop.time()
        await asyncio.sleep(seconds)
        tokens, taken = await generated(server) - before, loop.time() - began
        return Rate(tokens / taken, (processor_s(pid) - busy) / tokens)


async def compare(
    server: Server, process: ServerProcess, args: argparse.Namespace
) -> list[tuple[Rate, Rate]]:
    """Without and with watchers, of each round."""
    works = [
        asyncio.ensure_future(answered(server, number, args.tokens))
        for number in range(args.clients)
    ]
    found = []
    async with beside(*works):
        await asyncio.sleep(WARM_S)
        for number in range(args.rounds):
            order = (0, args.watchers) if number % 2 else (args.watchers, 0)
            taken = {count: await rate(server, process, args.seconds, count) for count in order}
            found.append((taken[0], taken[args.watchers]))
    return found


async def measured(args: argparse.Namespace) -> Sequence[tuple[Rate, Rate]]:
    words = [args.model, "--max-seqs", str(args.clients), "--threads", str(args.threads)]
    with serve_alone(*words, "--no-access-log") as (server, process):
        await process.answers(server)
        return await compare(server, process, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--watchers", type=int, default=5)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    args = parser.parse_args()
    found = asyncio.run(measured(args))
    more = median_of([watched.tokens / alone.tokens - 1 for alone, watched in found])
    busy = median_of([watched.busy / alone.busy - 1 for alone, watched in found])
    alone = median_of([alone.tokens for alone, _ in found])
    print(
        f"{args.clients} clients, {args.watchers} watchers, {args.rounds} rounds: "
        f"{alone.value:.0f} tokens per second; watched {more.value:+.2%} "
        f"({more.low:+.2%} to {more.high:+.2%}), and processor time per token {busy.value:+.2%} "
        f"({busy.low:+.2%} to {busy.high:+.2%})"
    )


if __name__ == "__main__":
    main()
