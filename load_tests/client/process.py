"""Starts, waits for and stops the server processes of a load test. Knows no server program."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ropewalk.load_tests.client.client import Server, Unreachable, fetch

HOST = "127.0.0.1"
_POLL_S = 0.1  # short, because the start of a server is measured, too
_ANSWER_S = 2.0  # a server that is still loading may accept a connection and not answer
_START_LIMIT_S = 600.0  # a peer that compiles takes minutes
_STOP_LIMIT_S = 5.0
_LOG_LINES = 15
# Thread counts set for other work must not slow a server down, and variables that configure a
# user's own server must not reach these.
_UNSET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PREFIX, _KEPT = "ROPEWALK_", "ROPEWALK_HOME"


class StartFailed(Exception):
    """A server did not come up, or ended by itself; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process in a group of its own, so that its children end with it. `with` stops it."""

    title: str
    words: Sequence[str]
    log: Path
    popen: "subprocess.Popen[bytes]"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def answers(
        self, server: Server, tell: Callable[[str], object] = lambda line: None
    ) -> None:
        """Wait until /health answers; `tell` is called repeatedly with the time waited.

        Raises StartFailed when the process ends, or takes too long.
        """
        began = time.monotonic()
        probe = replace(server, timeout_s=_ANSWER_S)
        while (waited := time.monotonic() - began) < _START_LIMIT_S:
            if self.popen.poll() is not None:
                raise self.failed("ended at its start")
            tell(f"starting {self.title}: {waited:.0f} s")
            try:
                await fetch(probe, "GET", "/health")  # a peer's answer is empty
            except Unreachable:
                await asyncio.sleep(_POLL_S)
            else:
                return
        raise self.failed("did not answer in time")

    def failed(self, what: str) -> StartFailed:
        """An error with `what` as the message, and the end of the log."""
        tail = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return StartFailed("\n".join([f"{self.title}: {shlex.join(self.words)} {what}", *tail]))

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C would."""
        self._signal(signal.SIGINT)

    def stop(self) -> None:
        """End it and its children, with an interrupt first, so that it can clean up."""
        self.interrupt()
        try:
            self.popen.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:  # a peer's worker thread outlives its shutdown
            pass
        finally:
            self._signal(signal.SIGKILL)
            self.popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group is gone once all its processes have ended and been waited for.
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def start(title: str, words: Sequence[str], log: Path) -> ServerProcess:
    """Its output goes to the file `log`. Raises StartFailed when there is no such program."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _UNSET and (name == _KEPT or not name.startswith(_PREFIX))
    }
    with log.open("wb") as output:
        try:
            popen = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise StartFailed(f"{words[0]}: {error.strerror}") from None
    return ServerProcess(title, words, log, popen)


def processor_s(pid: int, thread: int | None = None) -> float:
    """What a process, or one thread of it, has taken so far; 0 where Linux does not say."""
    folder = Path(f"/proc/{pid}") / ("" if thread is None else f"task/{thread}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
