"""Times an answer while other programs are busy. Run by hand, with the flags of `ropewalk serve`.

    python -m tests.server.time_beside smollm2 --dtype bfloat16

Each busy program keeps one core and runs in a session of its own, as one started in another
terminal does: Linux shares cores between sessions before it shares them between threads.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.server.test_end_to_end import Served

ANSWERS = 10
BODY = {
    "prompt": "The capital of France is",
    "max_tokens": 32,
    "ignore_eos": True,
    "temperature": 0,
}
BUSY = [sys.executable, "-c", "while True: pass"]


def seconds_of_answer(served: Served) -> float:
    began = time.perf_counter()
    status, answer = served.post("/v1/completions", BODY)
    assert status == 200, answer
    return time.perf_counter() - began


def beside(count: int, served: Served) -> list[float]:
    """Seconds of each answer while `count` programs keep a core busy each."""
    programs = [subprocess.Popen(BUSY, start_new_session=True) for _ in range(count)]
    try:
        return [seconds_of_answer(served) for _ in range(ANSWERS)]
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main() -> None:
    model, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(model), Path(folder), *flags)
        try:
            beside(0, served)
            cores = len(os.sched_getaffinity(0))
            for count in range(cores + 1):
                seconds = beside(count, served)
                print(
                    f"{count} busy programs on {cores} cores: median {median(seconds):.2f} s, "
                    f"{min(seconds):.2f} to {max(seconds):.2f}",
                    flush=True,
                )
        finally:
            served.stop()


if __name__ == "__main__":
    main()
