"""Starts and stops the servers of a comparison: Ropewalk and `transformers serve`.

A system runs alone while it is measured, with both cores, the same weights and the same precision
options its own command line offers.
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from load_tests.client import DIALECTS, Dialect, Server, Unreachable, get_json

_HOST = "127.0.0.1"
_POLL_S = 0.5
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 5.0
_LOG_LINES = 15
# Thread counts chosen for other work here must not slow a server down.
_UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ROPEWALK_THREADS")

OURS = "{python} -m server serve {model} --host {host} --port {port} --dtype {dtype}"
TRANSFORMERS = (
    "{peer_python} -m transformers.cli.transformers serve {noeos} --continuous-batching "
    "--device cpu --dtype {dtype} --attn-implementation sdpa --cb-max-batch-tokens 2048 "
    "--cb-num-blocks 1024 --cb-block-size 32 --host {host} --port {port}"
)


class StartFailed(Exception):
    """A server did not come up; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class System:
    """One server program with one precision. `command` has {port} left to fill in."""

    name: str
    dialect: Dialect
    command: str


def system_from(spec: str, *, ours: str, peer_python: Path, model: Path, noeos: Path) -> System:
    """`ropewalk:DTYPE` or `transformers:DTYPE` → how to start it. Raises ValueError."""
    program, _, dtype = spec.partition(":")
    templates: Mapping[str, tuple[str, str]] = {
        "ropewalk": (ours, "openai"),
        "transformers": (TRANSFORMERS, "transformers"),
    }
    if program not in templates or not dtype:
        raise ValueError(f"{spec!r} is not ropewalk:DTYPE or transformers:DTYPE")
    template, dialect = templates[program]
    command = template.format(
        python=shlex.quote(sys.executable),
        peer_python=shlex.quote(str(peer_python)),
        model=shlex.quote(str(model)),
        noeos=shlex.quote(str(noeos)),
        dtype=dtype,
        host=_HOST,
        port="{port}",
    )
    return System(spec, DIALECTS[dialect], command)


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers, and the process whose CPU time is its own."""

    server: Server
    pid: int


@asynccontextmanager
async def running(system: System, logs: Path, timeout_s: float) -> AsyncIterator[Started]:
    """Start a system, wait until it answers, stop it afterwards. Raises StartFailed.

    Its output goes to a file in `logs`; `timeout_s` is the limit of each request to it.
    """
    port = _free_port()
    words = shlex.split(system.command.format(port=port))
    environment = {k: v for k, v in os.environ.items() if k not in _UNSET}
    log_path = logs / f"{system.name.replace(':', '-')}.log"
    with log_path.open("wb") as log:
        try:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise StartFailed(f"{words[0]}: {error.strerror}") from None
        try:
            server = Server(_HOST, port, system.dialect, timeout_s=timeout_s)
            if not await _answers(server, process):
                raise StartFailed(
                    _last_words(f"{system.name}: {shlex.join(words)}", process, log_path)
                )
            yield Started(server, process.pid)
        finally:
            _stop(process)


async def _answers(server: Server, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            await get_json(server, "/health")
        except Unreachable:
            await asyncio.sleep(_POLL_S)
        else:
            return True
    return False


def _last_words(title: str, process: subprocess.Popen[bytes], log: Path) -> str:
    what = "did not answer in time" if process.poll() is None else "ended at its start"
    tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"{title} {what}", *tail])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all it started; an interrupt first, so that it can tidy up."""
    _signal(process, signal.SIGINT)
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:  # a peer's worker thread outlives its shutdown
        pass
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The group is gone once all its processes have ended and been waited for.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
