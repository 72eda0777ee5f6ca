"""Does a part of a step grow faster than its work? `--help` says what is timed and how."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.rounds import Call, Clock, rounds
from ropewalk.load_tests.micro.in_process import decoders
from ropewalk.load_tests.micro.measured import add_options, place_of, run, write
from ropewalk.load_tests.micro.scaling_parts import AHEAD, HELD, SIZES, Part, parts
from ropewalk.load_tests.report.charts import Mark, Series, lines, plain
from ropewalk.load_tests.report.formatting import fine_milliseconds
from ropewalk.load_tests.run.options import add, counts, program
from ropewalk.report.figure import Picture, looks
from ropewalk.report.statistics import MIN_VALUES, Estimate, median_of
from ropewalk.report.table import markdown
from ropewalk.server.errors import CommandError
from ropewalk.server.launch.load_model import find_kernels

Verdict = Literal["as its work or slower", "grows faster than its work", "undecided"]

_DEFAULTS: Mapping[str, str] = {
    "batch": "1,2,4,8,16,32,64",
    "context": "256,1k,4k,16k",
    "pool": "1000,10000,100000",
    "queue": "10,100,1000",
    "prompt": "1000,2500,5000,10000",
    "answer": "500,1000,2000,4000",
}
MARGIN = 0.2  # on an exponent: twice the work may take 2.3 times as long

_DESCRIPTION = f"""\
How the time of each part of a step grows with its size, and whether faster than its work.

parts:
  pass            one pass of the decoder, with the kernels and paged cache of `ropewalk serve`
  rest            the rest of an engine's step, around a decoder that computes nothing: scheduling,
                  batch building, sampling, audit, counts. Measured with the pool empty, with it
                  full of cached blocks that must be evicted, and while other requests queue
                  because all places are taken (no place) or the cache is full (no room)
  queue, abort    a request joins the end of the queue and leaves it
  new prompt      a prompt to its first token, in chunks of 512, around that same decoder
  cached prompt   the same when the prefix cache has the prompt
  whole answer    an answer, token by token, around that same decoder
  manager         the cache manager alone: {HELD} blocks reserved, committed and released

A part's work grows as its size to some power: 1 for a pass against its batch, 0 for finding a
block in a pool or the next request in a queue. All sizes of a part take turns in random order, and
each is compared with the size before it in the same round: if four times the size takes twice as
long, the time grew as the size to the power of 0.5. A part `grows faster than its work` if, at the
two largest sizes, even the lower end of the interval of that exponent is more than {MARGIN} above
the exponent of its work, grows `as its work or slower` if not even the upper end is, and is
`undecided` otherwise: ask for more rounds. Smaller sizes do not count because fixed costs hide the
growth there.

By default the processor time of one thread counts, because other programs change it least. Use
--clock wall only on a machine that does nothing else; on CUDA, passes have the device's own clock.
"""

_EPILOG = f"""\
examples:
  python -m ropewalk.load_tests.micro.scaling --out scaling
  python -m ropewalk.load_tests.micro.scaling --only pool --pool 1000,100000
  python -m ropewalk.load_tests.micro.scaling --only queue --only pool --queue 10,1000,10000

The table goes to standard output, progress to standard error.
Exit status: 0; 1 when a part grows faster than its work; 2 when nothing was measured.
Intervals need {MIN_VALUES} rounds or more. The defaults take some minutes.
"""


@dataclass(frozen=True, slots=True)
class Growth:
    """The seconds of each size, and the exponent of growth from each size to the next."""

    part: Part
    sizes: Sequence[int]
    seconds: Sequence[Estimate]
    exponents: Sequence[Estimate]

    @property
    def verdict(self) -> Verdict | None:
        """None of one size, which has no growth."""
        if not self.exponents:
            return None
        last, most = self.exponents[-1], self.part.power + MARGIN
        if last.high <= most:
            return "as its work or slower"
        return "grows faster than its work" if last.low > most else "undecided"

    @property
    def too_fast(self) -> bool:
        return self.verdict == "grows faster than its work"


def main(argv: Sequence[str] | None = None) -> int:
    return run("scaling", _parser(), argv, _measure, _report)


def _report(
    measured: list[tuple[Part, list[dict[int, float]]]],
    words: Sequence[str],
    args: argparse.Namespace,
) -> int:
    growths = [growth_of(part, taken) for part, taken in measured]
    print(_table(growths))
    if args.out:
        content = {"parts": [_as_json(*each) for each in zip(growths, measured, strict=True)]}
        charts = [_chart(along, each) for along, each in _by_along(growths).items()]
        write(args.out, "scaling", words, args, content, charts)
    return int(any(growth.too_fast for growth in growths))


def growth_of(part: Part, taken: Sequence[Mapping[int, float]]) -> Growth:
    """The growth from seconds by size, round by round."""
    sizes = list(taken[0])
    exponents = []
    for size, larger in pairwise(sizes):
        doublings = math.log(larger / size)
        exponents.append(
            median_of([math.log(each[larger] / each[size]) / doublings for each in taken])
        )
    seconds = [median_of([each[size] for each in taken]) for size in sizes]
    return Growth(part, sizes, seconds, exponents)


def _parser() -> argparse.ArgumentParser:
    options = program("python -m ropewalk.load_tests.micro.scaling", _DESCRIPTION, _EPILOG)
    add_options(options)
    for name, counted in SIZES.items():
        meaning = f"{counted}, from small to large (default: {_DEFAULTS[name]})"
        add(options, f"--{name} A,B", counts, counts(_DEFAULTS[name]), meaning)
    options.add_argument(
        "--only",
        choices=tuple(SIZES),
        action="append",
        help="time only the parts by this size; repeat for several (default: all)",
    )
    add(options, "--encoding NAME", str, "rope", "of the decoder (default: %(default)s)")
    add(options, "--rounds N", int, 15, "default: %(default)s")
    return options


def _measure(args: argparse.Namespace) -> list[tuple[Part, list[dict[int, float]]]]:
    """Every part, with the seconds of a call by size for each round."""
    if not 1 <= args.rounds <= AHEAD // 8:
        raise CommandError(
            f"--rounds {args.rounds} is out of range; use a number from 1 to {AHEAD // 8}"
        )
    device, dtype, clock = place_of(args)
    progress = Progress(sys.stderr)
    progress.start(f"{args.shape} under {args.encoding}: making the decoder")
    on_cpu = find_kernels(torch.device("cpu"))
    (decoder,) = decoders(
        args.shape,
        [args.encoding],
        context=max(args.context),
        dtype=dtype,
        device=device,
        kernels=on_cpu if device.type == "cpu" else find_kernels(device),
    ).values()
    largest = {name: max(vars(args)[name]) for name in SIZES}
    only = args.only or list(SIZES)
    chosen = [part for part in parts(decoder, largest, on_cpu) if part.along in only]
    measured = []
    progress.schedule(len(chosen))
    for part in chosen:
        progress.start(f"{part.name}, by {SIZES[part.along]}")
        sizes = sorted(vars(args)[part.along])
        own_clock: Clock = "processor" if clock == "cuda" and not part.on_device else clock
        measured.append((part, _timed(part, sizes, args.rounds, own_clock, args.seed)))
        progress.finish()
    progress.clear()
    return measured


def _timed(
    part: Part, sizes: Sequence[int], count: int, clock: Clock, seed: str
) -> list[dict[int, float]]:
    calls = {str(size): _several(part.prepare(size), part.times) for size in sizes}
    return [
        {int(size): seconds / part.times for size, seconds in taken.items()}
        for taken in rounds(calls, count, clock, seed)
    ]


def _several(call: Call, times: int) -> Call:
    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def _table(growths: Sequence[Growth]) -> str:
    rows = [("part", "by", "size", "ms", "time grew as size to the power of", "its work", "")]
    for growth in growths:
        part = growth.part
        for at, (size, seconds) in enumerate(zip(growth.sizes, growth.seconds, strict=True)):
            last = at == len(growth.sizes) - 1
            rows.append(
                (
                    part.name if at == 0 else "",
                    SIZES[part.along] if at == 0 else "",
                    f"{size:,}",
                    fine_milliseconds(seconds.value),
                    _exponent(growth.exponents[at - 1]) if at else "",
                    f"{part.power:g}" if last and at else "",
                    growth.verdict or "" if last else "",
                )
            )
    return markdown(rows, left=2)


def _exponent(found: Estimate) -> str:
    middle = f"{found.value:.2f}"
    if math.isinf(found.high):
        return middle
    return f"{middle} ({found.low:.2f} to {found.high:.2f})".replace("-", "−")


def _by_along(growths: Sequence[Growth]) -> dict[str, list[Growth]]:
    found: dict[str, list[Growth]] = {}
    for growth in growths:
        found.setdefault(growth.part.along, []).append(growth)
    return found


def _chart(along: str, growths: Sequence[Growth]) -> Picture:
    """Milliseconds by size, a line for each part."""
    look = looks([growth.part.name for growth in growths], None)
    series = []
    for growth in growths:
        marks = []
        for size, found in zip(growth.sizes, growth.seconds, strict=True):
            told = f"{size:,}: {fine_milliseconds(found.value)} ms"
            marks.append(Mark(found.drawable().times(1e3), told, x=size))
        series.append(Series(growth.part.name, look[growth.part.name], marks))
    return lines(f"ms by {SIZES[along]}", series, SIZES[along], plain)


def _as_json(
    growth: Growth, measured: tuple[Part, Sequence[Mapping[int, float]]]
) -> dict[str, object]:
    part, taken = measured
    return {
        "part": part.name,
        "along": part.along,
        "power": part.power,
        "sizes": list(growth.sizes),
        "calls_per_sample": part.times,
        "exponents": [each.value for each in growth.exponents],
        "too_fast": growth.too_fast,
        "verdict": growth.verdict,
        "samples": list(taken),  # seconds by size, round by round
    }


if __name__ == "__main__":
    sys.exit(main())
