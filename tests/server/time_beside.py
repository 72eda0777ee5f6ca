"""How long an answer takes beside busy programs. Run by hand, with the flags of `ropewalk serve`.

    python -m tests.server.time_beside smollm2 --dtype bfloat16

Each busy program keeps one core and runs in a session of its own, as one started in another
terminal does: Linux shares cores between sessions before it shares them between threads.
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.server.test_end_to_end import Served

ANSWERS = 10
BODY = {"prompt": "The capital of France is", "max_tokens": 32, "ignore_eos": True}
BUSY = [sys.executable, "-c", "while True: pass"]


def seconds_of_answer(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    asked = json.dumps(BODY | {"model": "m", "temperature": 0})
    connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    return time.perf_counter() - began


def beside(count: int, port: int) -> list[float]:
    """Seconds of each answer beside so many busy programs."""
    programs = [subprocess.Popen(BUSY, start_new_session=True) for _ in range(count)]
    try:
        return [seconds_of_answer(port) for _ in range(ANSWERS)]
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main() -> None:
    model, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(model), Path(folder), *flags)
        try:
            beside(0, served.port)
            cores = len(os.sched_getaffinity(0))
            for count in range(cores + 1):
                seconds = beside(count, served.port)
                print(
                    f"{count} busy programs on {cores} cores: median {median(seconds):.2f} s, "
                    f"{min(seconds):.2f} to {max(seconds):.2f}",
                    flush=True,
                )
        finally:
            served.stop()


if __name__ == "__main__":
    main()
