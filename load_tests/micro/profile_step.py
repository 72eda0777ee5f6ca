"""`ropewalk bench --profile-step`: where the time of a step goes. `--help` lists the parts."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.micro.in_process import decoders
from ropewalk.load_tests.micro.measured import add_device, place_of, run, write
from ropewalk.load_tests.micro.profile_engine import (
    StepTimes,
    needed_context,
    step_times,
)
from ropewalk.load_tests.micro.profile_http import http_times
from ropewalk.load_tests.report.formatting import fine_milliseconds, percent
from ropewalk.load_tests.run.options import add, count, counts, program
from ropewalk.load_tests.run.serving import FAMILY, SHAPE, parse_serve
from ropewalk.report.table import markdown
from ropewalk.server.launch.load_model import find_kernels

_DESCRIPTION = """\
Where the time of a decode step goes. A step gives each of --batch requests its next token.

The engine runs in this process, wired as in `ropewalk serve`, with random weights of a shape and a
cache that already holds --context tokens of every request. Each part of the step is timed; a part
inside another one is subtracted from it, so nothing counts twice, and the parts, `rest` included,
add up to the whole step. `position` is rotating queries and keys, and adding position embeddings.
A bias, or keys that attention itself rotates (rope:raw, rope:block), counts as `attention`; the
bias that t5:materialised builds for the step counts as `rest of the decoder`. `head` is the linear
layer over the vocabulary, `metrics` is updating the counters of /metrics.

Where all layers are one call of the CPU kernels, these time themselves, and `kernel call` is the
time that Python needs to make the call. Otherwise each module is timed from Python, which visibly
slows the step of a small model; `step, not timed` is measured on as many steps without timers,
mixed with the others, and shows by how much. Each figure is a mean over the faster half of steps.
On CUDA the device is synchronised wherever a part ends, so steps take longer than in service.

The rows below the step are what its tokens cost outside the engine, on the event loop's thread,
while the next step runs: `detokenising` (with the search for stop strings), `chunks as JSON`, and
`HTTP`, which is all else on that thread: waking streams, ASGI, uvicorn, the socket. They are the
processor time of the real application on a socket, with an engine that computes nothing in steps
as long as those above. Its tokens are numbers as text; words of a real vocabulary are longer.
"""

_EPILOG = """\
examples:
  ropewalk bench --profile-step
  ropewalk bench --profile-step --serve shape:small --encodings nope,t5:table --batch 1,64
  ropewalk bench --profile-step --dtype bfloat16 --context 4k --out profile

Tables go to standard output, progress to standard error.
Exit status: 0, or 2 when nothing was measured.
"""


@dataclass(frozen=True, slots=True)
class Profile:
    """One variant's steps, and seconds by part outside the engine, by requests in the batch."""

    variant: str
    executor: str
    steps: Mapping[int, StepTimes]
    outside: Mapping[int, Mapping[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    return run("ropewalk bench", _parser(), argv, _measure, _report)


def _report(measured: list[Profile], words: Sequence[str], args: argparse.Namespace) -> int:
    print("\n\n".join(table(profile, args.context) for profile in measured))
    if args.out:
        content = {"profiles": [asdict(profile) for profile in measured]}
        write(args.out, "profile step", words, args, content)
    return 0


def _parser() -> argparse.ArgumentParser:
    options = program("ropewalk bench --profile-step", _DESCRIPTION, _EPILOG)
    options.add_argument("--profile-step", action="store_true", help=argparse.SUPPRESS)
    model = f"{SHAPE}NAME or the path of a config.json (default: %(default)s)"
    add(options, "--serve MODEL", _shape, "shape:smollm2", model)
    encodings = "optionally with a form or storage, as t5:table or rope:block; or "
    encodings += "package.module:Class (default: %(default)s)"
    add(options, "--encodings NAME,...", str, "rope", encodings)
    add(options, "--batch N,...", counts, (1, 8, 32), "requests that decode (default: 1,8,32)")
    add(options, "--context N", count, 512, "tokens of each request (default: %(default)s)")
    add(options, "--steps N", count, 48, "steps timed (default: %(default)s)")
    add_device(options)
    threads = max((os.cpu_count() or 1) - 1, 1)
    meaning = "of the CPU kernels (default: one less than cores, as servers of --serve use)"
    add(options, "--threads N", count, threads, meaning)
    options.add_argument("--out", metavar="NAME", help="write NAME.json")
    options.set_defaults(clock="wall")
    return options


def _shape(text: str) -> str:
    """The shape as `decoders` takes it. Raises ValueError."""
    source = parse_serve(text)
    if source == FAMILY:
        raise ValueError(f"{FAMILY} cannot be profiled; use {SHAPE}small, which has the same shape")
    return source.removeprefix(SHAPE)


def _measure(args: argparse.Namespace) -> list[Profile]:
    device, dtype, _ = place_of(args)
    variants = list(dict.fromkeys(args.encodings.split(",")))
    progress = Progress(sys.stderr)
    progress.start(f"{args.serve}: making the decoders")
    kernels = find_kernels(device)
    made = decoders(
        args.serve,
        variants,
        context=needed_context(args.context, args.steps),
        dtype=dtype,
        device=device,
        kernels=kernels,
    )
    measured = []
    progress.schedule(len(made) * len(args.batch))
    for variant, decoder in made.items():
        steps, outside = {}, {}
        for requests in args.batch:
            progress.start(f"{variant}, batch {requests}")
            steps[requests] = step_times(
                decoder, requests, args.context, args.steps, kernels=kernels
            )
            outside[requests] = http_times(requests, steps[requests].unwatched, args.steps)
            progress.finish()
        measured.append(Profile(variant, decoder.executor.name, steps, outside))
    progress.clear()
    return measured


def table(profile: Profile, context: int) -> str:
    """Milliseconds of each part, and its share of the step, by batch."""
    steps, outside = profile.steps, profile.outside
    header = ["part"]
    for requests in steps:
        header += [f"batch {requests}, ms", "of the step"]
    rows = [header]
    found = {
        requests: {
            **times.parts,
            "**step**": times.step,
            "step, not timed": times.unwatched,
            **{f"in parallel: {part}": seconds for part, seconds in outside[requests].items()},
        }
        for requests, times in steps.items()
    }
    for name in next(iter(found.values())):
        row = [name]
        for requests, times in steps.items():
            seconds = found[requests][name]
            row += [fine_milliseconds(seconds), f"{percent(seconds / times.step)} %"]
        rows.append(row)
    by = f"computed by the {profile.executor} executor"
    return f"{profile.variant}, context {context:,}, {by}\n\n{markdown(rows)}"


if __name__ == "__main__":
    sys.exit(main())
