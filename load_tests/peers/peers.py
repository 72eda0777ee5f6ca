"""Compares Ropewalk with other servers: same machine, weights, prompts and client.

Systems take turns, in a fixed order, each alone on the machine while measured. Prompts are text,
because not every peer accepts token ids, and end-of-text never ends an answer.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

from ropewalk.load_tests.client.client import Variant, complete
from ropewalk.load_tests.client.environment import environment
from ropewalk.load_tests.client.facts import Facts, variants_of
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.micro.roofline import read_rates
from ropewalk.load_tests.peers.peer_table import (
    PROCESSES,
    ROWS,
    WEIGHT_BYTES,
    Lifetime,
    peer_table,
    rows_from,
    sizes,
)
from ropewalk.load_tests.peers.systems import (
    OURS,
    PEERS,
    ROPEWALK,
    System,
    peer_from,
    resident_bytes,
    running,
    system_from,
)
from ropewalk.load_tests.run.bench import (
    Measured,
    as_result,
    complete_options,
    report,
    run_to_end,
    typed_again,
)
from ropewalk.load_tests.run.options import add, checked, count
from ropewalk.load_tests.run.runner import NoSuccess, Runner
from ropewalk.load_tests.workload.prompts import PromptMaker

_PROGRAM = ("python", "-m", "ropewalk.load_tests.peers.peers")
_DESCRIPTION = """\
Compare Ropewalk with other servers on this machine, which runs one of them at a time.
docs/load-testing-peers.md says how to install them and what is compared.

work:
"""

_EPILOG = """\
example:
  python -m ropewalk.load_tests.peers.peers --model MODEL_FOLDER --peer vllm=VLLM/bin/python \\
      --peer transformers=TRANSFORMERS/bin/python --runs 5 --out peers

The folder of --out gets result.json, with every sample, and report.html.
Exit status: 0 when every request was served, 1 when some failed, 2 when a system could not be
measured, 130 when the comparison was interrupted.
"""


def parser() -> argparse.ArgumentParser:
    work = "".join(f"  {row.name:<12} {row.title}\n" for row in ROWS.values())
    options = argparse.ArgumentParser(
        prog="ropewalk.load_tests.peers.peers",
        description=_DESCRIPTION + work,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="has the weights in the format of each system: bf16/, bf16-noeos/, openvino/, "
        "bfloat16.gguf; in 8 bits openvino-int8/, int8.gguf",
    )
    options.add_argument(
        "--peer",
        type=checked(peer_from),
        action="append",
        default=[],
        metavar="PEER=PROGRAM",
        help="the Python that has the peer, or llamacpp's llama-server; repeat for several of "
        f"{', '.join(PEERS)}",
    )
    systems = "PROGRAM:DTYPE of each system, in the order of turns; the first is compared with the "
    systems += "others (default: ropewalk and every --peer, in bfloat16); int8: weights in 8 bits"
    add(options, "--systems A,B", str, None, systems)
    add(options, "--ours COMMAND", str, OURS, "how to start Ropewalk (default: %(default)s)")
    add(
        options,
        "--work NAME,...",
        rows_from,
        tuple(ROWS.values()),
        "some of the above (default: all)",
    )
    runs = "runs of every system, which is started for each (default: %(default)s)"
    add(options, "--runs N", count, 5, runs)
    each = "requests of each worker in a run, except for shared (default: %(default)s)"
    add(options, "--requests-per-worker N", count, sizes(4).requests_per_worker, each)
    whole = "seconds in which an answer must be complete (default: %(default)g)"
    add(options, "--timeout S", float, 600.0, whole)
    add(options, "--seed TEXT", str, None, "seed of prompts and order (default: a new one)")
    folder = "for the results (default: one named after the time)"
    add(options, "--out FOLDER", str, None, folder)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """0: all were served; 1: some failed; 2: a system could not be measured; 130: interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser()
    args = options.parse_args(words)
    peers = dict(args.peer)
    specs = args.systems or ",".join(f"{name}:bfloat16" for name in (ROPEWALK, *peers))
    try:
        systems = [
            system_from(spec, ours=args.ours, peers=peers, model=args.model)
            for spec in specs.split(",")
        ]
    except ValueError as error:
        options.error(str(error))
    complete_options(args, "peers")
    measured = Measured()
    progress = Progress(sys.stderr)
    status, reason = run_to_end(
        partial(_measure, systems, args, measured, progress), args.out, progress
    )
    if reason:
        print(f"ropewalk.load_tests.peers.peers: {reason}", file=sys.stderr)
        measured.warnings.append(f"The comparison ended early ({reason}); results are incomplete.")
    if not measured.runs:
        return status
    args.work = [row.name for row in args.work]  # as result.json stores it
    args.peer = [f"{name}={program}" for name, program in args.peer]
    result = as_result(typed_again(_PROGRAM, words, args.seed), args, measured)
    served = report(result, Path(args.out))
    print(f"\n{peer_table(result)}")
    return status or served


async def _measure(
    systems: Sequence[System], args: argparse.Namespace, measured: Measured, progress: Progress
) -> None:
    size = sizes(args.requests_per_worker)
    loads = [row.load for row in args.work]
    runner = Runner(lambda seed: PromptMaker(seed, "text"), size, args.seed, progress)
    measured.warnings = runner.warnings
    lifetimes: dict[str, list[dict[str, object]]] = {system.name: [] for system in systems}
    weights = sum(file.stat().st_size for file in (args.model / "bf16").glob("*.safetensors"))
    measured.environment = {
        **await environment([]),
        WEIGHT_BYTES: weights,
        PROCESSES: lifetimes,
    }
    progress.schedule(args.runs * len(systems) * len(loads))
    with tempfile.TemporaryDirectory(prefix="ropewalk-peers-") as logs:
        for round in range(args.runs):
            for system in systems:
                title = f"round {round + 1} of {args.runs}"
                progress.start(f"{title}, starting {system.name}")
                reading = read_rates()
                began = time.monotonic()
                async with running(system, Path(logs), args.timeout) as (server, pid):
                    variant = replace((await variants_of(server, ()))[0], label=system.name)
                    prompts = PromptMaker(f"{args.seed}/{round}/start", "text")
                    await _answer(variant, prompts, prompt_tokens=16)
                    start_s = time.monotonic() - began
                    loaded = resident_bytes(pid)
                    if round == 0:
                        measured.variants.append(variant)
                        measured.facts[variant.label] = Facts()
                    await runner.warm_up([variant])
                    # Nor shall a run pay for what is initialised by the first long prompt.
                    await _answer(variant, prompts, prompt_tokens=size.prefill_tokens)
                    async for run in runner.round([variant], loads, round, title):
                        measured.runs.append(run)
                    used = resident_bytes(pid)
                read = median(reading + read_rates())
                lifetimes[system.name].append(asdict(Lifetime(round, start_s, loaded, used, read)))


async def _answer(variant: Variant, prompts: PromptMaker, prompt_tokens: int) -> None:
    """One request, to its end. Raises NoSuccess when it fails."""
    request = Request(prompts.prompt(prompt_tokens), prompt_tokens, output_tokens=4)
    outcome = await complete(variant.server, request)
    if outcome.error is not None:
        raise NoSuccess(f"{variant.label} at {variant.server.url}: {outcome.error}")


if __name__ == "__main__":
    sys.exit(main())
