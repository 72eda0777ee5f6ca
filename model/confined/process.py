"""Runs foreign work in a process of its own, which has little and can be stopped at any time.

For what a checkpoint brings and no library bounds: its chat template, and its tokenizer's file.
What the process does is a module that ends in `answer` of model/confined/inside.py.
"""

import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from ropewalk.model.confined.inside import HEAD, OUT_OF_MEMORY

ROOT = Path(__file__).parents[3]  # where `ropewalk` is found
MAX_REPLY = 128 << 20  # bytes
WAIT = 10.0  # seconds by the clock for what takes a fraction of one, except on a busy machine
KEPT = ("TZ", "LD_LIBRARY_PATH")  # of the environment: the local time, and where libpython may be


class Stopped(Exception):
    """The work was too much, or ended its process; the message says which, as a clause."""


class Confined:
    """One process. Ends with whoever holds it, whatever it computes at that moment."""

    def __init__(self, module: str, packages: Sequence[str], memory: int) -> None:
        """packages: from elsewhere, those that the module imports. memory: bytes for its work.

        Returns before the process is ready.
        """
        paths = [str(ROOT), *dict.fromkeys(map(_folder_of, packages))]
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        self._memory = memory
        # Without `site` it starts in half the time; in a session of its own, Ctrl-C in the
        # terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-W", "ignore", "-m", module, str(memory)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **kept,
                "PYTHONPATH": os.pathsep.join(paths),
                # Each arena of malloc, and each thread, would take from the limit on memory.
                "MALLOC_ARENA_MAX": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            cwd="/",
            start_new_session=True,
        )
        self._seconds = 0.0
        self.end = weakref.finalize(self, _end, self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, work: bytes, *, seconds: float, wait: float) -> None:
        """Begin some work, which may take so much processor time. Raises Stopped.

        wait: seconds until the process must have read it.
        """
        self._seconds = seconds
        assert self._process.stdin is not None
        unsent = memoryview(HEAD.pack(len(work), seconds) + work)
        with _Deadline(self._process.stdin.fileno(), selectors.EVENT_WRITE, wait) as ready:
            while unsent:
                if not ready():
                    raise self._stopped(f"it did not begin within {wait:g} s")
                try:
                    unsent = unsent[os.write(self._process.stdin.fileno(), unsent) :]
                except BrokenPipeError:
                    raise self._stopped() from None

    def hear(self, *, wait: float) -> bytes:
        """The result of the work that was begun. Raises Stopped."""
        assert self._process.stdout is not None
        received = bytearray()
        size = HEAD.size
        with _Deadline(self._process.stdout.fileno(), selectors.EVENT_READ, wait) as ready:
            while len(received) < size:
                if not ready():
                    raise self._stopped(f"it took more than {wait:g} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                received += piece
                if not piece:
                    raise self._stopped()
                if size == HEAD.size and len(received) >= size:
                    size += min(HEAD.unpack_from(received)[0], MAX_REPLY)
        return bytes(received[HEAD.size :])

    def _stopped(self, why: str | None = None) -> Stopped:
        """End the process. Without a reason, it closed its pipes and so has ended, or will."""
        if why is None:
            try:
                why = self._reason(self._process.wait(1))
            except subprocess.TimeoutExpired:
                why = "its process closed its pipes"
        self.end()
        return Stopped(why)

    def _reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"it used more than {self._seconds:.2g} s of processor time"
        # The libraries of C++ and Rust abort where they get no memory.
        if status in (OUT_OF_MEMORY, -signal.SIGABRT):
            return f"it needed more than {self._memory >> 20} MiB of memory"
        return f"its process ended with status {status}"


def attempt(
    module: str, packages: Sequence[str], work: bytes, *, memory: int, seconds: float
) -> bytes:
    """The result of a single piece of work. Raises Stopped."""
    process = Confined(module, packages, memory)
    try:
        process.tell(work, seconds=seconds, wait=WAIT)
        return process.hear(wait=WAIT + seconds)
    finally:
        process.end()


class _Deadline:
    """Whether a pipe becomes ready before so many seconds have passed since this was made."""

    def __init__(self, descriptor: int, event: int, seconds: float) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, event)
        self._end = time.monotonic() + seconds

    def __enter__(self) -> "_Deadline":
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()

    def __call__(self) -> bool:
        return bool(self._selector.select(max(0, self._end - time.monotonic())))


def _folder_of(package: str) -> str:
    """Where an installed package is found, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return str(Path(found.origin).parents[1])


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
