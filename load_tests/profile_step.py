"""`ropewalk bench --profile-step`: where the time of a step goes. `--help` lists the parts."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from load_tests.in_process import decoders
from load_tests.measured import add_device, markdown, place_of, run, write
from load_tests.options import checked, count, counts
from load_tests.profile_engine import StepTimes, needed_context, step_times, told_by_kernels
from load_tests.profile_http import http_times
from load_tests.progress import Progress
from load_tests.serving import FAMILY, SHAPE, parse_serve
from load_tests.words import fine_milliseconds, percent
from server.decoders import find_kernels

_DESCRIPTION = """\
Where the time of a step goes that gives each of --batch requests its next token.

The engine is in this process and wired as `ropewalk serve` does it, with random weights of a shape
and a cache that already holds --context tokens of every request. Its parts are watched: a part
within another one is taken from it, so nothing counts twice, and the parts with `rest` are the
whole step. `position` is turning queries and keys, and embeddings of positions. A bias, or keys
that attention turns itself (rope:raw, rope:block), counts as `attention`, and the bias that
t5:materialised builds for the step as `rest of the decoder`. `head` is the linear layer over the
vocabulary, `metrics` what is counted for /metrics.

What is one call of the CPU kernels tells its times itself; `kernel call` is what Python takes for
it. All others are watched module by module, which slows a step of a
small model visibly; `step, not watched` is of as many steps among the watched ones, and shows how
much. Each figure is a mean over the faster half. On CUDA the device is waited for wherever a part
ends, so steps take longer than in service.

Below the step is what its tokens cost outside the engine, on the event loop's thread, beside the
next step: `detokenising` with the search for stop strings, `chunks as JSON`, and as `HTTP` all
else of that thread: waking streams, ASGI, uvicorn, the socket. It is processor time of the real
application on a socket, under an engine that computes nothing in steps as long as those above.
Tokens there are the shape's numbers: a real vocabulary has longer words.
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
    """One arm's steps, and seconds by part outside the engine, both by requests in the batch."""

    arm: str
    told_by_kernels: bool
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
    options = argparse.ArgumentParser(
        prog="ropewalk bench --profile-step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--profile-step", action="store_true", help=argparse.SUPPRESS)
    options.add_argument(
        "--serve",
        type=checked(_shape),
        default="shape:smollm2",
        metavar="MODEL",
        help="shape:NAME or the path of a config.json (default: %(default)s)",
    )
    options.add_argument(
        "--encodings",
        default="rope",
        metavar="NAME,...",
        help="also with a form or frame, as t5:table or rope:block, or package.module:Class "
        "(default: %(default)s)",
    )
    options.add_argument(
        "--batch",
        type=counts,
        default=(1, 8, 32),
        metavar="N,...",
        help="requests that decode (default: 1,8,32)",
    )
    options.add_argument(
        "--context", type=count, default=512, metavar="N", help="tokens (default: %(default)s)"
    )
    options.add_argument(
        "--steps", type=count, default=48, metavar="N", help="watched (default: %(default)s)"
    )
    add_device(options)
    options.add_argument(
        "--threads",
        type=count,
        default=max((os.cpu_count() or 1) - 1, 1),
        metavar="N",
        help="of the CPU kernels (default: one less than cores, as servers of --serve have)",
    )
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
    arms = list(dict.fromkeys(args.encodings.split(",")))
    progress = Progress(sys.stderr)
    progress.start(f"{args.serve}: making the decoders")
    kernels = find_kernels(device)
    made = decoders(
        args.serve,
        arms,
        context=needed_context(args.context, args.steps),
        dtype=dtype,
        device=device,
        kernels=kernels,
    )
    measured = []
    progress.schedule(len(made) * len(args.batch))
    for arm, decoder in made.items():
        steps, outside = {}, {}
        for requests in args.batch:
            progress.start(f"{arm}, batch {requests}")
            steps[requests] = step_times(
                decoder, requests, args.context, args.steps, kernels=kernels
            )
            outside[requests] = http_times(requests, steps[requests].unwatched, args.steps)
            progress.finish()
        measured.append(Profile(arm, told_by_kernels(decoder), steps, outside))
    progress.clear()
    return measured


def table(profile: Profile, context: int) -> str:
    """Milliseconds of each part, and its share of the step, by batch."""
    steps, outside = profile.steps, profile.outside
    columns = [[f"batch {requests}, ms", "of the step"] for requests in steps]
    rows = [["part", *_flat(columns)]]

    found = {
        requests: {
            **times.parts,
            "**step**": times.step,
            "step, not watched": times.unwatched,
            **{f"beside it: {part}": seconds for part, seconds in outside[requests].items()},
        }
        for requests, times in steps.items()
    }
    for name in next(iter(found.values())):
        cells = [_cells(found[requests][name], steps[requests].step) for requests in steps]
        rows.append([name, *_flat(cells)])
    way = (
        "layers tell their own times"
        if profile.told_by_kernels
        else "layers are watched module by module; `rest of the decoder` holds storing keys and "
        "values, and the residual"
    )
    return f"{profile.arm}, context {context:,}: {way}\n\n{markdown(rows)}"


def _cells(seconds: float, step: float) -> list[str]:
    return [fine_milliseconds(seconds), f"{percent(seconds / step)} %"]


def _flat(cells: Sequence[Sequence[str]]) -> list[str]:
    return [text for each in cells for text in each]


if __name__ == "__main__":
    sys.exit(main())
