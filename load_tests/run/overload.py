"""What a server still does when far more is asked of it than it can: goodput, waits, refusals.

    python -m ropewalk.load_tests.run.overload

Starts a server of one model and measures its capacity, by half as many clients again as it answers
at once; then requests arrive at random, at a multiple of that rate. Each round measures both,
because a machine's speed drifts. The client keeps to the last core, which the server's steps leave
to it and to the event loop, and its processor time is taken off: rates are per second of what it
left of the machine.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from ropewalk.load_tests.client.client import Server, Unreachable, complete, get_json
from ropewalk.load_tests.client.process import ServerProcess, StartFailed, processor_s
from ropewalk.load_tests.common.statistics import percentile
from ropewalk.load_tests.common.types import Profile, Request
from ropewalk.load_tests.run.options import add, count, program
from ropewalk.load_tests.run.serving import serve_alone
from ropewalk.load_tests.workload.arrivals import Driven, drive
from ropewalk.load_tests.workload.prompts import PromptMaker

_PROBE = 4  # requests of each worker from which the rate is guessed
_REFUSED = "status 429"


@dataclass(frozen=True, slots=True)
class Processor:
    """Seconds of processor time since the start: the client's, the server's, its event loop's."""

    client: float
    server: float
    loop: float

    def __sub__(self, other: "Processor") -> "Processor":
        return Processor(
            self.client - other.client, self.server - other.server, self.loop - other.loop
        )


@dataclass(frozen=True, slots=True)
class Phase:
    """One load: counts, and seconds."""

    served: int
    refused: int
    failures: Sequence[str]  # any other end
    seconds: float
    cpu: Processor
    first_tokens: Sequence[float]  # of those that were to be sent in the steady window
    lag: float  # by which the client sent late (p99)

    @property
    def rate(self) -> float:
        """Served per second of what the client left of the machine."""
        return self.served / (self.seconds - self.cpu.client / (os.cpu_count() or 1))

    @property
    def p99(self) -> float:
        return percentile(self.first_tokens, 99)


@dataclass(frozen=True, slots=True)
class Round:
    capacity: Phase
    overload: Phase

    @property
    def goodput(self) -> float:
        """Of the capacity."""
        return self.overload.rate / self.capacity.rate

    @property
    def efficiency(self) -> float:
        """Served per second of the server's processor time, of that at capacity."""
        calm, busy = self.capacity, self.overload
        return (busy.served / busy.cpu.server) / (calm.served / calm.cpu.server)

    @property
    def refusal_s(self) -> float:
        """Processor time of the event loop for each refusal: what is not for served requests."""
        calm, busy = self.capacity, self.overload
        spent = busy.cpu.loop - calm.cpu.loop / calm.served * busy.served
        return spent / max(busy.refused, 1)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        with serve_alone(*_words(args)) as (server, started):
            rounds = asyncio.run(_measure(args, server, started))
    except (StartFailed, Unreachable) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(summary(rounds, args.max_queue_time)))
    return 0 if all(sound(each) for each in rounds) else 1


def sound(one: Round) -> bool:
    """Whether every request was served or refused as it should be."""
    return not (one.capacity.failures or one.overload.failures)


def summary(rounds: Sequence[Round], limit: float) -> list[str]:
    """The medians of some rounds, a line each."""
    failures = [each for one in rounds for each in (*one.capacity.failures, *one.overload.failures)]
    return [
        f"capacity: {median(one.capacity.rate for one in rounds):.1f} requests/s, first token "
        f"after {median(one.capacity.p99 for one in rounds):.2f} s (p99)",
        f"overload: goodput {median(one.goodput for one in rounds):.2f} of the capacity "
        f"({', '.join(f'{one.goodput:.2f}' for one in rounds)})",
        f"  per second of the server's processor time: "
        f"{median(one.efficiency for one in rounds):.2f}",
        f"  accepted: first token after {median(one.overload.p99 for one in rounds):.2f} s (p99); "
        f"the limit in the queue is {limit:g} s",
        f"  the client sent late by {max(one.overload.lag for one in rounds) * 1e3:.1f} ms (p99)",
        f"  refused: {sum(one.overload.refused for one in rounds)}, each at "
        f"{median(one.refusal_s for one in rounds) * 1e3:.2f} ms of processor time",
        f"  failed otherwise: {len(failures)}" + "".join(f"\n    {each}" for each in failures[:5]),
    ]


async def _measure(args: argparse.Namespace, server: Server, started: ServerProcess) -> list[Round]:
    await started.answers(server)
    _keep_to_the_last_core()
    (model,) = (await get_json(server, "/v1/models"))["data"]
    rounds = []
    for number in range(args.rounds):
        seed = f"overload/{number}"
        prompts = PromptMaker(seed, "ids", model["vocab_size"])
        draw = partial(_request, prompts, args, random.Random(number))
        load = partial(_load, server, started, draw, seed)
        together = Profile("closed", concurrency=args.max_seqs + args.max_seqs // 2)
        probe = await load(_PROBE * together.concurrency, together)
        requests = int(probe.rate * args.seconds) + 2 * together.concurrency
        capacity = await load(requests, together)
        if not capacity.served:
            raise StartFailed(f"the server answers nothing: {capacity.failures[:1]}")
        rate = args.factor * capacity.served / capacity.seconds
        overload = await load(int(rate * args.seconds), Profile("poisson", rate=rate))
        rounds.append(Round(capacity, overload))
        print(f"round {number + 1} of {args.rounds}", *summary(rounds[-1:], args.max_queue_time),
              sep="\n  ", file=sys.stderr)  # fmt: skip
    return rounds


def _keep_to_the_last_core() -> None:
    """Linux wakes a client beside the server's steps as often as not, and they wait for it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _request(prompts: PromptMaker, args: argparse.Namespace, sizes: random.Random) -> Request:
    """Of half to one and a half times the tokens asked for.

    Requests of one size that follow one another begin and end in step, and their prompts share
    passes: no traffic is like that, and a server seems to answer a tenth more than it can.
    """
    prompt_tokens, output_tokens = (
        sizes.randint((size + 1) // 2, size * 3 // 2)
        for size in (args.prompt_tokens, args.output_tokens)
    )
    return Request(prompts.prompt(prompt_tokens), prompt_tokens, output_tokens)


async def _load(
    server: Server,
    started: ServerProcess,
    draw: Callable[[], Request],
    seed: str,
    requests: int,
    profile: Profile,
) -> Phase:
    """Raises StartFailed if the server ends."""
    plan = [draw() for _ in range(requests)]
    phase = await _phase(server, started.popen.pid, plan, profile, seed)
    if started.popen.poll() is not None:
        raise started.failed("ended under load")
    return phase


async def _phase(
    server: Server, pid: int, plan: Sequence[Request], profile: Profile, seed: str
) -> Phase:
    before, began = _processor(pid), time.perf_counter()
    driven = await drive(plan, profile, seed, partial(complete, server))
    spent, ended = _processor(pid) - before, time.perf_counter()
    return phase_of(driven, spent, ended - began)


def phase_of(driven: Driven, spent: Processor, seconds: float) -> Phase:
    """`spent` in all `seconds`, of which the steady window is a part."""
    steady = driven.steady_to - driven.steady_from
    share = min(steady / seconds, 1.0)
    served = [each for each in driven.outcomes if each.error is None]
    begun = [each for each in served if driven.steady_from <= each.intended <= driven.steady_to]
    errors = [each.error for each in driven.outcomes if each.error is not None]
    return Phase(
        served=sum(driven.steady_from <= each.ended <= driven.steady_to for each in served),
        refused=sum(error.startswith(_REFUSED) for error in errors),
        failures=[error for error in errors if not error.startswith(_REFUSED)],
        seconds=steady,
        cpu=Processor(spent.client * share, spent.server * share, spent.loop * share),
        first_tokens=[each.chunks[0][0] - each.intended for each in begun if each.chunks],
        lag=percentile([each.sent - each.intended for each in driven.outcomes], 99),
    )


def _processor(pid: int) -> Processor:
    return Processor(time.process_time(), processor_s(pid), processor_s(pid, thread=pid))


def _words(args: argparse.Namespace) -> list[str]:
    words = [args.model, "--max-seqs", str(args.max_seqs)]
    words += ["--max-queue-time", str(args.max_queue_time)]
    words += ["--threads", str(max((os.cpu_count() or 1) - 1, 1))]  # the last is the client's
    return [*words, "--no-access-log", "--log-level", "warning"]


def _parser() -> argparse.ArgumentParser:
    options = program(
        "python -m ropewalk.load_tests.run.overload",
        __doc__,
        "Exit status: 0 when every request was served or refused with 429, 1 when not,\n"
        "2 when the server does not start, or ends.",
    )
    model = "what to serve, as `ropewalk serve` takes it (%(default)s)"
    add(options, "--model MODEL", str, "ropewalk-rope", model)
    add(options, "--seconds S", float, 60.0, "of each load (%(default)s)")
    add(options, "--rounds N", count, 3, "of both loads; figures are medians (%(default)s)")
    add(options, "--factor X", float, 2.0, "of the capacity that is asked for (%(default)s)")
    add(options, "--max-queue-time S", float, 1.0, "the server's (%(default)s)")
    add(options, "--max-seqs N", count, 16, "the server's (%(default)s)")
    add(options, "--prompt-tokens N", count, 64, "of a request at the mean (%(default)s)")
    add(options, "--output-tokens N", count, 16, "of a request at the mean (%(default)s)")
    return options


if __name__ == "__main__":
    sys.exit(main())
