"""Starts and stops the servers of a comparison: Ropewalk and `transformers serve`.

A system runs alone while it is measured, with both cores, the same weights and the same precision
options its own command line offers.
"""

import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from load_tests import process
from load_tests.client import DIALECTS, Dialect, Server

OURS = "{python} -m server serve {model} --host {host} --port {port} --dtype {dtype}"
TRANSFORMERS = (
    "{peer_python} -m transformers.cli.transformers serve {noeos} --continuous-batching "
    "--device cpu --dtype {dtype} --attn-implementation sdpa --cb-max-batch-tokens 2048 "
    "--cb-num-blocks 1024 --cb-block-size 32 --host {host} --port {port}"
)


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
        host=process.HOST,
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
    port = process.free_port()
    words = shlex.split(system.command.format(port=port))
    started = process.start(system.name, words, logs / f"{system.name.replace(':', '-')}.log")
    try:
        server = Server(process.HOST, port, system.dialect, timeout_s=timeout_s)
        await started.answers(server)
        yield Started(server, started.popen.pid)
    finally:
        started.stop()
