"""The cost of a step under each encoding, compared with none: `--help` describes the method."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.rounds import interval_json, ratios, rounds
from ropewalk.load_tests.micro.in_process import blocks_for, decoders, new_cache, passes
from ropewalk.load_tests.micro.measured import add_options, place_of, run, write
from ropewalk.load_tests.report.charts import Mark, Series, dots
from ropewalk.load_tests.report.formatting import milliseconds, signed
from ropewalk.load_tests.report.plot import percent_tick
from ropewalk.load_tests.run.options import add, count, program
from ropewalk.report.figure import Picture, looks
from ropewalk.report.statistics import MIN_VALUES, Estimate, median_of
from ropewalk.report.table import markdown
from ropewalk.server.errors import CommandError
from ropewalk.server.launch.load_model import find_kernels

Verdict = Literal["holds", "does not hold", "undecided"]

ZERO = "nope"
VARIANTS = (
    ZERO,
    "rope",
    "alibi",
    "t5",
    "learned",
    "sinusoidal",
    "t5:table",
    "t5:materialised",
    "rope:raw",
    "rope:block",
)
CLAIMED = frozenset({"rope", "alibi", "t5", "learned", "sinusoidal"})  # the limits apply to these
LIMITS: Mapping[str, float] = {"decode": 1.02, "prefill": 1.04}  # largest ratio to ZERO
AGAIN = f"{ZERO} again"

_DESCRIPTION = f"""\
What a decoder step costs under each positional encoding, compared with the same step under none.

Two steps are timed: decode, one token for each of --batch requests that have --context tokens, and
prefill, the last --chunk tokens of one prompt of --context. Each is one pass of the decoder as
`ropewalk serve` makes it, with its kernels, batch layout and paged cache; scheduling, sampling and
HTTP are the same for all encodings, so they are left out, which makes relative differences larger.

All variants share one set of random weights, down to the packed tensors that the kernels read, and
one cache. Cost does not depend on the values. In every round each variant runs once, in random
order, and is compared with {ZERO} of the same round; the table has the median of those ratios with
a 95 % interval from their ranks, which assumes nothing about the noise. `{AGAIN}` is {ZERO} a
second time: its distance from +0 shows how far the rest of the table can be trusted.

Limits: over {ZERO}, decode {LIMITS["decode"] - 1:.0%} and prefill {LIMITS["prefill"] - 1:.0%}. A
limit `holds` if the whole interval is below it, `does not hold` if the whole interval is above,
and is `undecided` otherwise: ask for more rounds. Forms, storages and options (t5:table, rope:raw,
rope:near=512+group=8) have no limit.

By default the processor time of one thread counts, because other programs change it least: it
excludes the time they run, and they disturb caches and memory for all variants of a round alike.
With more threads use --clock wall on a machine that does nothing else: processor time then includes
threads that wait for each other. On CUDA the time is that between events on the device.
"""

_EPILOG = f"""\
examples:
  python -m ropewalk.load_tests.micro.step_cost
  python -m ropewalk.load_tests.micro.step_cost --shape smollm2 --rounds 60 --out step-cost
  python -m ropewalk.load_tests.micro.step_cost --variants rope,t5 --batch 1 --prefill-rounds 0

The table goes to standard output, progress to standard error.
Exit status: 0; 1 when a limit does not hold; 2 when nothing was measured.
Intervals need {MIN_VALUES} rounds or more. With `small` the defaults take some minutes.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one variant's step, and its ratio to ZERO's."""

    variant: str
    seconds: float
    ratio: Estimate
    limit: float | None
    verdict: Verdict | None

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"ratio": interval_json(self.ratio)}


def main(argv: Sequence[str] | None = None) -> int:
    return run("step_cost", _parser(), argv, _measure, _report)


def _report(
    samples: dict[str, list[dict[str, float]]], words: Sequence[str], args: argparse.Namespace
) -> int:
    costs = {work: costs_of(taken, LIMITS[work]) for work, taken in samples.items()}
    print(table(costs))
    if args.out:
        content = {
            "costs": {work: [cost.as_json() for cost in each] for work, each in costs.items()},
            "samples": samples,  # seconds, round by round
        }
        charts = [_chart(work, each) for work, each in costs.items()]
        write(args.out, "step cost", words, args, content, charts)
    verdicts = {cost.verdict for each in costs.values() for cost in each}
    return int("does not hold" in verdicts)


def costs_of(taken: Sequence[Mapping[str, float]], limit: float) -> list[Cost]:
    """The costs from the seconds of every round. The limit applies to variants in CLAIMED."""
    found = []
    for variant in taken[0]:
        ratio = median_of(ratios(taken, variant, ZERO))
        seconds = median_of([each[variant] for each in taken]).value
        own = limit if variant in CLAIMED else None
        found.append(
            Cost(variant, seconds, ratio, own, None if own is None else verdict(ratio, own))
        )
    return found


def verdict(ratio: Estimate, limit: float) -> Verdict:
    if ratio.high <= limit:
        return "holds"
    return "does not hold" if ratio.low > limit else "undecided"


def _parser() -> argparse.ArgumentParser:
    options = program("python -m ropewalk.load_tests.micro.step_cost", _DESCRIPTION, _EPILOG)
    add_options(options)
    variants = f"variants compared with {ZERO} (default: %(default)s)"
    add(options, "--variants A,B", str, ",".join(VARIANTS[1:]), variants)
    add(options, "--context N", count, 4096, "tokens of each request (default: 4k)")
    add(options, "--batch N", count, 8, "requests that decode (default: %(default)s)")
    add(options, "--chunk N", count, 512, "tokens of a prefill (default: %(default)s)")
    add(options, "--rounds N", int, 100, "rounds of decode; 0: none (default: %(default)s)")
    prefill = "rounds of prefill; 0: none (default: %(default)s)"
    add(options, "--prefill-rounds N", int, 20, prefill)
    return options


def _measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Seconds by work, round and variant."""
    if args.chunk > args.context:
        raise CommandError(
            f"--chunk {args.chunk} is more than --context; use {args.context} or less"
        )
    if args.rounds < 1 and args.prefill_rounds < 1:
        raise CommandError(
            "--rounds and --prefill-rounds of 0 leave nothing to measure; ask for some of either"
        )
    device, dtype, clock = place_of(args)
    variants = [ZERO, *(variant for variant in args.variants.split(",") if variant != ZERO)]
    progress = Progress(sys.stderr)
    progress.start(f"{args.shape} under {', '.join(variants)}: making the decoders")
    made = decoders(
        args.shape,
        variants,
        context=args.context,
        dtype=dtype,
        device=device,
        kernels=find_kernels(device),
    )
    made[AGAIN] = made[ZERO]
    gates = max(each.gates for each in made.values())
    kv = new_cache(made[ZERO], blocks_for(args.batch, args.context), gates)
    steps = {
        "decode": (args.batch, 1, args.rounds),
        "prefill": (1, args.chunk, args.prefill_rounds),
    }
    samples: dict[str, list[dict[str, float]]] = {}
    for work, (requests, rows, wanted) in steps.items():
        if wanted < 1:
            continue
        calls = passes(made, kv, requests, args.context, rows)
        progress.start(f"{work}: {wanted} rounds of {len(calls)} passes")
        samples[work] = []
        for taken in rounds(calls, wanted, clock, args.seed):
            samples[work].append(taken)
            progress.note(f"{work}: {len(samples[work])} of {wanted} rounds")
    progress.clear()
    return samples


def table(costs: Mapping[str, Sequence[Cost]]) -> str:
    rows = [("step", "encoding", "ms", f"over {ZERO}, 95 % interval", "limit", "")]
    for work, each in costs.items():
        for cost in each:
            rows.append(
                (
                    work,
                    cost.variant,
                    milliseconds(cost.seconds),
                    "" if cost.variant == ZERO else _difference(cost.ratio),
                    "" if cost.limit is None else f"{signed(cost.limit)} %",
                    cost.verdict or "",
                )
            )
    return markdown(rows, left=2)


def _difference(ratio: Estimate) -> str:
    """+1.2 % (+0.8 to +1.9), without the interval if it is infinite."""
    middle = f"{signed(ratio.value)} %"
    if math.isinf(ratio.high):
        return middle
    return f"{middle} ({signed(ratio.low)} to {signed(ratio.high)})"


def _chart(work: str, costs: Sequence[Cost]) -> Picture:
    """Differences in percent; hollow if the interval contains 0."""
    look = looks([cost.variant for cost in costs], ZERO)
    rows = []
    for cost in costs[1:]:
        ratio = cost.ratio.drawable()
        ends = [100 * (each - 1) for each in (ratio.value, ratio.low, ratio.high)]
        same, text = ends[1] <= 0 <= ends[2], f"{signed(ratio.value)} %"
        mark = Mark(Estimate(*ends), "", text, hollow=same)
        rows.append(Series(cost.variant, look[cost.variant], [mark]))
    return dots(f"{work}: time over {ZERO}", {"": rows}, "percent", percent_tick, centred=True)


if __name__ == "__main__":
    sys.exit(main())
