"""Starts and stops the servers of a comparison: Ropewalk and `transformers serve`.

A system runs alone while it is measured, with both cores, the same weights and the same precision
options its own command line offers.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from load_tests.client import DIALECTS, Dialect, Server, Unreachable, get_json

_HOST = "127.0.0.1"
_POLL_S = 0.5
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 20.0
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


def system(spec: str, *, ours: str, peer_python: Path, model: Path, noeos: Path) -> System:
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
        python=sys.executable,
        peer_python=peer_python,
        model=model,
        noeos=noeos,
        dtype=dtype,
        host=_HOST,
        port="{port}",
    )
    return System(spec, DIALECTS[dialect], command)


class Running:
    """A started server: `async with Running(system, log_folder) as server`."""

    def __init__(self, started: System, logs: Path, timeout_s: float) -> None:
        self._system = started
        self._log_path = logs / f"{started.name.replace(':', '-')}.log"
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Server:
        """Start and wait until it answers. Raises StartFailed."""
        port = _free_port()
        words = self._system.command.format(port=port).split()
        environment = {k: v for k, v in os.environ.items() if k not in _UNSET}
        self._log = self._log_path.open("wb")
        try:
            self._process = subprocess.Popen(
                words,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            server = Server(_HOST, port, self._system.dialect, timeout_s=self._timeout_s)
            await self._answers(server)
        except OSError as error:
            self._log.close()
            raise StartFailed(f"{words[0]}: {error.strerror}") from None
        except BaseException:  # also a cancellation: no server is left behind
            self._stop()
            raise
        return server

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop()

    async def _answers(self, server: Server) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                await get_json(server, "/health")
            except Unreachable:
                await asyncio.sleep(_POLL_S)
            else:
                return
        what = "did not answer in time" if self._process.poll() is None else "ended at its start"
        tail = self._log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        raise StartFailed("\n".join([f"{self._system.name} {what}: {self._system.command}", *tail]))

    def _stop(self) -> None:
        """End the server and all it started; an interrupt first, so that it can tidy up."""
        assert self._process is not None and self._log is not None
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
            try:
                self._process.wait(_STOP_LIMIT_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
