"""Two workers behind vllm-router and behind NVIDIA Dynamo, beside one server with as much cache.

    scripts/routers-check

Sends the load of replicas.py to each, and again while a worker is killed, drained or restarted.
What was measured is kept in the folder of --out, so a run that was stopped goes on with the same
arguments. docs/scaling.md says what it means.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import Server, Unreachable, get_json
from ropewalk.load_tests.client.process import ServerProcess, StartFailed
from ropewalk.load_tests.client.scrape import snapshot
from ropewalk.load_tests.run.replicas import (
    Sent,
    Sizes,
    conclude,
    kept,
    send_all,
    send_disturbed,
    table,
)
from ropewalk.load_tests.run.serving import terminated_as_interrupted

# By engine, the ways to choose a worker: from one that knows nothing to the best.
POLICIES = {
    "vllm-router": ("round_robin", "cache_aware", "kv_aware"),
    "Dynamo": (
        "round-robin",
        "kv",
        "kv --no-router-track-active-blocks --router-kv-overlap-score-credit 4 "
        "--router-predicted-ttl-secs 5",
    ),
}
# What changes a request on its way: Dynamo's frontend begins completions without a special token.
FIELDS: Mapping[str, Mapping[str, object]] = {"Dynamo": {"add_special_tokens": False}}
DYNAMO = Path(__file__).resolve().parents[2] / "deploy" / "dynamo"
_KV = 72 << 20  # bytes of a worker's cache: two hold the load's beginnings, one does not
_UP_S = 120.0
_POLL_S = 0.2
_RUNNING = re.compile(r"^ropewalk_requests_running(?:{[^}]*})? [2-9]", re.M)  # two or more


@dataclass(frozen=True, slots=True)
class Command:
    """A process, and where it answers /health."""

    title: str
    words: Sequence[str]
    server: Server


@dataclass(frozen=True, slots=True)
class Stack:
    """A router and the workers behind it; of one server, it is both."""

    title: str
    router: Command
    workers: Sequence[Command] = ()

    @property
    def metrics(self) -> list[Server]:
        return [worker.server for worker in self.workers or (self.router,)]


@dataclass(frozen=True, slots=True)
class Made:
    """What makes stacks: a Python with all of it, a bundled model and a folder for Dynamo's."""

    python: str
    model: str
    tokenizer: Path

    def one_server(self, name: str) -> Stack:
        """For comparison with what is behind a router of that name."""
        title = f"one server, asked as by {name}" if name in FIELDS else "one server"
        return Stack(title, self._server("server", 2 * _KV))

    def stack(self, name: str, policy: str, place: str) -> Stack:
        """place: an empty folder, for what needs one."""
        return self.dynamo(policy, place) if name == "Dynamo" else self.vllm_router(policy)

    def vllm_router(self, policy: str) -> Stack:
        events = [f"tcp://{process.HOST}:{process.free_port()}" for _ in range(2)]
        workers = [
            self._server(f"worker {number}", _KV, "--threads", "1", "--kv-events", endpoint)
            for number, endpoint in enumerate(events)
        ]
        urls = [worker.server.url for worker in workers]
        router = _somewhere()
        words = [str(Path(self.python).parent / "vllm-router"), "--host", router.host]
        words += ["--port", str(router.port), "--worker-urls", *urls, "--policy", policy]
        words += ["--prometheus-port", str(process.free_port())]
        words += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
        if policy == "kv_aware":
            words += ["--kv-event-model", self.model]
            for url, endpoint in zip(urls, events, strict=True):
                words += ["--kv-event-source", f"{url}={endpoint}"]
        return Stack(f"vllm-router, {policy}", Command("router", words, router), workers)

    def dynamo(self, mode: str, found_in: str) -> Stack:
        """found_in: an empty folder in which frontend and workers find each other."""
        planes = ["--discovery-backend", "file", "--event-plane", "zmq"]
        workers = []
        for number in range(2):
            system = _somewhere(range(20_000, 1 << 15))  # Dynamo reads 16 bits with a sign
            words = ["env", f"DYN_FILE_KV={found_in}", f"DYN_SYSTEM_PORT={system.port}"]
            words += [self.python, str(DYNAMO / "worker.py"), self.model]
            words += ["--tokenizer", str(self.tokenizer), *_options(_KV), "--threads", "1"]
            words += ["--endpoint-types", "completions", *planes]
            workers.append(Command(f"worker {number}", words, system))
        router = _somewhere()
        words = ["env", f"DYN_FILE_KV={found_in}", self.python, "-m", "dynamo.frontend"]
        words += ["--http-host", router.host, "--http-port", str(router.port)]
        words += ["--router-mode", *mode.split(), "--migration-limit", "3", *planes]
        server = replace(router, model=self.model)
        return Stack(f"Dynamo, {mode}", Command("frontend", words, server), workers)

    def _server(self, title: str, kv: int, *more: str) -> Command:
        server = _somewhere()
        words = [self.python, "-m", "ropewalk", "serve", self.model, "--host", server.host]
        return Command(title, [*words, "--port", str(server.port), *_options(kv), *more], server)


def _somewhere(ports: range | None = None) -> Server:
    """An address at which nobody listens now, at one of `ports` if they are given."""
    port = process.free_port()
    while ports is not None and port not in ports:
        with suppress(OSError), socket.create_server((process.HOST, random.choice(ports))) as free:
            port = free.getsockname()[1]
    return Server(process.HOST, port, timeout_s=60, idle_s=60)


def _options(kv: int) -> list[str]:
    return ["--kv-memory", str(kv), "--kv-spill", "0", "--dtype", "float32"]


class Running:
    """The processes of a stack, which end with `ended`."""

    def __init__(self, stack: Stack, logs: Path, ended: ExitStack) -> None:
        self._stack = stack
        self._logs = logs
        self._ended = ended
        self._victim: ServerProcess | None = None

    async def start(self) -> None:
        """Returns once all of it serves. Raises StartFailed."""
        started = [await self._started(worker) for worker in self._stack.workers]
        self._victim = started[0] if started else None
        router = await self._started(self._stack.router)
        began = time.monotonic()
        while not await _models(self._stack.router.server):
            if time.monotonic() - began > _UP_S:
                raise router.failed("found no model")
            await asyncio.sleep(_POLL_S)

    async def kill(self) -> None:
        """A worker that computes, without warning. Nobody starts another."""
        while not _RUNNING.search(await snapshot(self._stack.workers[0].server)):
            await asyncio.sleep(0)
        self._signal(signal.SIGKILL)

    async def drain(self) -> None:
        """A worker finishes its streams and ends."""
        self._signal(signal.SIGTERM)

    async def restart(self) -> float:
        """A worker is drained, and comes back at the same address: after how many seconds."""
        began = time.monotonic()
        await asyncio.to_thread(self._signal(signal.SIGTERM).wait)
        await self._started(self._stack.workers[0])
        return time.monotonic() - began

    def _signal(self, number: signal.Signals) -> "subprocess.Popen[bytes]":
        assert self._victim is not None, "one server has no workers"
        os.kill(self._victim.popen.pid, number)
        return self._victim.popen

    async def _started(self, command: Command) -> ServerProcess:
        log = self._logs / f"{self._stack.title}, {command.title}.log"
        started = self._ended.enter_context(process.start(command.title, command.words, log))
        await started.answers(command.server)
        return started


async def _models(server: Server) -> bool:
    try:
        return bool((await get_json(server, "/v1/models"))["data"])
    except Unreachable:
        return False


ACTS: Mapping[str, Callable[[Running], Awaitable[float | None]]] = {
    "killed": Running.kill,
    "drained": Running.drain,
    "restarted": Running.restart,
}


async def load(
    stack: Stack, model: str, sizes: Sizes, out: Path, fields: Mapping[str, object] | None = None
) -> Sent:
    """The load on a fresh stack, unless `out` has it."""

    async def measure() -> Sent:
        with ExitStack() as ended:
            await Running(stack, out, ended).start()
            server, metrics = stack.router.server, stack.metrics
            return await send_all(stack.title, server, sizes, metrics, fields=fields or {})

    return await kept(out / f"{stack.title}.json", model, sizes, measure)


async def disturbed(stack: Stack, act: str, model: str, sizes: Sizes, out: Path) -> Sent:
    """The load on a fresh stack while a worker is `act`, unless `out` has it."""
    title = f"{act}, {stack.title}"

    async def measure() -> Sent:
        with ExitStack() as ended:
            running = Running(stack, out, ended)
            await running.start()
            done = partial(ACTS[act], running)
            return await send_disturbed(title, stack.router.server, sizes, done)

    return await kept(out / f"{title}.json", model, sizes, measure)


async def measure(made: Made, sizes: Sizes, out: Path) -> int:
    found: list[str] = []
    for name, policies in POLICIES.items():
        one = await load(made.one_server(name), made.model, sizes, out, FIELDS.get(name))
        routed, acts = {}, {}
        for policy in policies:
            with tempfile.TemporaryDirectory() as place:
                stack = made.stack(name, policy, place)
                routed[policy] = await load(stack, made.model, sizes, out)
        print(table([one, *routed.values()], one), flush=True)
        for act in ACTS:
            with tempfile.TemporaryDirectory() as place:
                stack = made.stack(name, policies[-1], place)
                acts[act] = await disturbed(stack, act, made.model, sizes, out)
        found += conclude(one, routed, policies[0], policies[-1], acts)
    print("\n".join(found or ["All that must hold holds."]))
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="with routers and Ropewalk")
    parser.add_argument("--model", default="ropewalk-rope", help="a bundled one")
    parser.add_argument("--requests", type=int, default=Sizes().requests)
    parser.add_argument("--out", type=Path, default=Path("build/routers"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    made = Made(args.python, args.model, args.out / "tokenizer")
    subprocess.run([args.python, DYNAMO / "tokenizer.py", made.tokenizer], check=True)
    try:
        with terminated_as_interrupted():
            return asyncio.run(measure(made, Sizes(requests=args.requests), args.out))
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 2
    except Unreachable as error:
        print(f"{error}; {args.out} has the logs", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
