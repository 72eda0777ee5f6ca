"""Times an answer of `ropewalk serve` while other programs are busy. Takes the server's flags.

    python -m ropewalk.load_tests.run.beside smollm2 --dtype bfloat16

Each busy program keeps one core and runs in a session of its own, as one started in another
terminal does: Linux shares cores between sessions before it shares them between threads.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ropewalk.load_tests.client import process
from ropewalk.load_tests.client.client import DIALECTS, Server, fetch
from ropewalk.load_tests.run.serving import PROGRAM

ANSWERS = 10
BODY = {
    "prompt": "The capital of France is",
    "max_tokens": 32,
    "ignore_eos": True,
    "temperature": 0,
}
BUSY = [sys.executable, "-c", "while True: pass"]


async def beside(count: int, server: Server) -> list[float]:
    """Seconds of each answer while `count` programs keep a core busy each."""
    programs = [subprocess.Popen(BUSY, start_new_session=True) for _ in range(count)]
    seconds = []
    try:
        for _ in range(ANSWERS):
            began = time.perf_counter()
            await fetch(server, "POST", "/v1/completions", BODY)
            seconds.append(time.perf_counter() - began)
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return seconds


async def measure(flags: Sequence[str]) -> None:
    """Start a server with these flags, and print a line for each number of busy programs."""
    server = Server(process.HOST, process.free_port(), DIALECTS["openai"])
    place = ("--host", server.host, "--port", str(server.port))
    with tempfile.TemporaryDirectory() as folder:
        started = process.start("server", [*PROGRAM, *flags, *place], Path(folder) / "log")
        try:
            await started.answers(server)
            await beside(0, server)  # the first answers are slower
            cores = len(os.sched_getaffinity(0))
            for count in range(cores + 1):
                seconds = await beside(count, server)
                print(
                    f"{count} busy programs on {cores} cores: median {median(seconds):.2f} s, "
                    f"{min(seconds):.2f} to {max(seconds):.2f}",
                    flush=True,
                )
        finally:
            started.stop()


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1:]))
