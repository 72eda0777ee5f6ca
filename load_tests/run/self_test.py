"""Is the load generator fast enough? Streams from a stub that computes nothing, and what they cost.

    python -m ropewalk.load_tests.run.self_test

The stub runs in a process and, where there are two, on a core of its own. It paces its tokens, so
the client must keep up with a rate and not with itself; what one core could do is calculated from
the client's processor time, which other work on the machine does not change.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ropewalk.load_tests.client.client import Server, complete
from ropewalk.load_tests.common.statistics import percentile
from ropewalk.load_tests.common.types import Profile, Request
from ropewalk.load_tests.run.options import program
from ropewalk.load_tests.workload.arrivals import Driven, drive

TOKENS_PER_S = 2000  # that one core must reach
LAG_LIMIT_S = 0.005  # p99
_OUTPUT_TOKENS = 100
_PROMPT_TOKENS = 128
_PACE_S = 0.02  # between two tokens of a stream
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Speed:
    """What the client did, and what it took."""

    tokens: int
    failed: int
    seconds: float
    tokens_per_s: float  # from the end of the first streams to the start of the last
    cpu_s: float  # of the client's process
    lag_p99_s: float

    @property
    def core_tokens_per_s(self) -> float:
        """The rate with one core fully used."""
        return self.tokens / self.cpu_s

    @property
    def enough(self) -> bool:
        """Whether one core reaches the rate, without lag or failures."""
        fast = self.core_tokens_per_s >= TOKENS_PER_S
        return fast and self.lag_p99_s < LAG_LIMIT_S and not self.failed

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens in {self.seconds:.1f} s, {self.tokens_per_s:,.0f} a second "
            f"between ramp and drain, {self.failed} requests failed\n"
            f"client lag p99: {self.lag_p99_s * 1e3:.2f} ms\n"
            f"processor time: {self.cpu_s:.2f} s, {self.cpu_s / self.seconds:.0%} of one core; "
            f"{self.core_tokens_per_s:,.0f} tokens/s with the whole core"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """0: fast enough; 1: not."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["stub"]:
        asyncio.run(_serve())
        return 0
    program(
        "python -m ropewalk.load_tests.run.self_test",
        __doc__,
        "Takes 12 seconds. Exit status: 0 when it is fast enough, 1 when not.",
    ).parse_args(words)
    command = [sys.executable, "-m", "ropewalk.load_tests.run.self_test", "stub"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stub:
        try:
            _part(stub.pid)
            assert stub.stdout is not None
            speed = asyncio.run(measure(int(stub.stdout.readline()), seconds=10.0))
        finally:
            stub.kill()
    print(speed)
    return 0 if speed.enough else 1


async def measure(port: int, seconds: float, rate: float = TOKENS_PER_S) -> Speed:
    """Poisson arrivals at `rate` tokens per second from a stub at `port`."""
    server = Server("127.0.0.1", port, "stub")
    arrivals = rate / _OUTPUT_TOKENS
    request = Request(tuple(range(_PROMPT_TOKENS)), _PROMPT_TOKENS, _OUTPUT_TOKENS)
    plan = [request] * round(arrivals * seconds)

    await complete(server, request)
    cpu_s = time.process_time()
    profile = Profile("poisson", rate=arrivals)
    driven = await drive(plan, profile, "self-test", partial(complete, server))
    outcomes = driven.outcomes
    return Speed(
        tokens=sum(outcome.output_tokens for outcome in outcomes if outcome.error is None),
        failed=sum(outcome.error is not None for outcome in outcomes),
        seconds=max(o.ended for o in outcomes) - min(o.intended for o in outcomes),
        tokens_per_s=_steady_rate(driven),
        cpu_s=time.process_time() - cpu_s,
        lag_p99_s=percentile([o.sent - o.intended for o in outcomes], 99),
    )


def _steady_rate(driven: Driven) -> float:
    """Tokens per second; counts chunks, which have one token each."""
    start, end = driven.steady_from, driven.steady_to
    arrived = sum(start < at <= end for each in driven.outcomes for at, _ in each.chunks)
    return arrived / (end - start)


class Stub(asyncio.Protocol):
    """Answers any request with a stream of tokens, one every `_PACE_S`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun = 0.0
        self._sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = self._loop.time()
            self._transport.write(_HEAD)
            self._token()

    def _token(self) -> None:
        if self._transport.is_closing():
            return
        self._sent += 1
        self._transport.write(_CHUNKS[self._sent])
        if self._sent == _OUTPUT_TOKENS:
            self._transport.write(_END)
        else:
            self._loop.call_at(self._begun + self._sent * _PACE_S, self._token)


def _chunk(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def _completion(tokens: int, *choices: object) -> bytes:
    """A chunk as servers send it, with all the usual fields."""
    body = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1,
        "model": "stub",
        "choices": choices,
        "usage": {
            "prompt_tokens": _PROMPT_TOKENS,
            "completion_tokens": tokens,
            "total_tokens": _PROMPT_TOKENS + tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    return _chunk(json.dumps(body))


_CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
_CHUNKS = [_completion(tokens, _CHOICE) for tokens in range(_OUTPUT_TOKENS + 1)]
_END = _completion(_OUTPUT_TOKENS) + _chunk("[DONE]") + b"0\r\n\r\n"


async def _serve() -> None:
    """Print the port and answer until killed."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _part(stub: int) -> None:
    """Pin this process to the first core and the stub to the last."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        os.sched_setaffinity(stub, cores[-1:])


if __name__ == "__main__":
    sys.exit(main())
