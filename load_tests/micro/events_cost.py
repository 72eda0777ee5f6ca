"""What publishing KV events costs a step that decodes, beside an engine that publishes none.

python -m ropewalk.load_tests.micro.events_cost [MODEL] [--pairs N] [--rounds N] [--batch N]

Two engines of one model compute a few steps each by turns, and a subscriber in a process of its own
gets the events; then two others, since no two lie in memory alike. Counted is the processor time of
the whole process, so also that of the thread that publishes and of ZeroMQ's; with one thread that
computes, other programs change it least. On a busy machine the processor time of these threads
alone says more.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from threading import enumerate as enumerate_threads
from typing import NamedTuple

import torch

from ropewalk.load_tests.common.rounds import rounds
from ropewalk.load_tests.micro.engines import loaded
from ropewalk.model.sampling import SamplingParams
from ropewalk.report.statistics import median_of
from ropewalk.server.engine.engine import Engine
from ropewalk.server.scheduling.request import Request

STEPS = 64  # of each engine in a round: four blocks of each request are filled
_SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
"""


def submit(engine: Engine, batch: int, length: int) -> None:
    """Prompts of different lengths, so that their blocks are not filled at once."""
    params = SamplingParams(max_tokens=length, temperature=0.0)
    for number in range(batch):
        prompt = random.Random(number).choices(range(100, 4000), k=20 + number % 16)
        request = Request(
            str(number), prompt, len(prompt), params, 0.0, random.Random(0), salt=str(number)
        )
        engine.submit(request)


def run(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.step()
    time.sleep(0.05)  # for what is still to be published


class Measured(NamedTuple):
    """Seconds of processor time for a step."""

    quiet: float
    told: float
    publishing: float  # of the latter, in the threads that publish


def published_s() -> float:
    """Processor time so far of the thread that publishes and of ZeroMQ's."""
    spent = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ZMQbg"):
            spent += int((task / "schedstat").read_text().split()[0])
    for thread in enumerate_threads():
        if thread.name == "kv-events":
            spent += int(
                Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
            )
    return spent / 1e9


def measure(model: str, batch: int, count: int, pair: int) -> Measured:
    """With engines of their own, of every other pair the silent first: no two lie alike."""
    steps = STEPS * (1 + count)  # of each engine: the first round does not count
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        load = partial(loaded, model, kv_memory="256M")
        telling = load(kv_events=endpoint) if pair % 2 else None
        silent = load()
        telling = telling or load(kv_events=endpoint)
        subscriber = subprocess.Popen([sys.executable, "-c", _SUBSCRIBER, endpoint])
        try:
            for engine in (silent.engine, telling.engine):
                submit(engine, batch, 40 + steps)
                for _ in range(30):  # prompts, and what begins slowly
                    engine.step()
            before = published_s()
            calls = {"quiet": partial(run, silent.engine), "told": partial(run, telling.engine)}
            taken = list(rounds(calls, count, "processor", f"{pair}"))
            own = (published_s() - before) / steps
        finally:
            subscriber.kill()
            subscriber.wait()
            telling.close()
    quiet, told = (median([each[name] for each in taken]) / STEPS for name in calls)
    return Measured(quiet, told, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--pairs", type=int, default=6, help="of engines")
    parser.add_argument("--rounds", type=int, default=4, help="of each pair")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pairs = []
    for number in range(args.pairs):
        pairs.append(measure(args.model, args.batch, args.rounds, number))
        print(f"pair {number + 1}: {pairs[-1].told / pairs[-1].quiet - 1:+.2%}", flush=True)
    quiet = median_of([each.quiet for each in pairs]).value
    more = median_of([each.told / each.quiet - 1 for each in pairs])
    cost = median_of([each.told - each.quiet for each in pairs]).value
    own = median_of([each.publishing for each in pairs]).value
    print(
        f"batch {args.batch}: a step {quiet * 1e3:.3f} ms; with events "
        f"{more.value:+.2%} ({more.low:+.2%} to {more.high:+.2%}), {cost * 1e6:.1f} µs; "
        f"the threads that publish {own / quiet:.2%}, {own * 1e6:.1f} µs"
    )


if __name__ == "__main__":
    main()
