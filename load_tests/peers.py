"""Side by side with `transformers serve`: same machine, weights, prompts and client; a ratio table.

Systems take turns (A B C A B C …), each alone on the machine while measured. Prompts are text,
because a peer takes nothing else, and end-of-text never ends an answer on either side.
"""

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from load_tests.bench import add_load_options, conclude, resolve, sizes_from, workloads_from
from load_tests.client import Unreachable
from load_tests.measure import NoSuccess, RunFigures, run, warm_up
from load_tests.process import StartFailed
from load_tests.progress import Progress
from load_tests.prompts import PromptMaker
from load_tests.report import Cell, ratio_table, results_table
from load_tests.scenarios import Scenario, scenarios
from load_tests.systems import OURS, System, running, system_from

_DESCRIPTION = """\
Compare Ropewalk with `transformers serve --continuous-batching` on this machine.

Prepare the peer once, in an environment of its own:
  python3 -m venv PEER
  PEER/bin/pip install torch==2.13.0
  PEER/bin/pip install 'transformers[serving]==5.23.0' accelerate gguf
  PEER/bin/python -m load_tests.export_hf MODEL.gguf MODEL_FOLDER
"""

_EPILOG = """\
example:
  python -m load_tests.peers --peer-python PEER/bin/python --model MODEL_FOLDER \\
      --workload closed --concurrency 32 --runs 3 --json peers.json
"""

Results = dict[str, dict[str, list[RunFigures]]]  # system → line → runs


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="load_tests.peers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--peer-python", type=Path, required=True, help="the Python that has transformers[serving]"
    )
    options.add_argument(
        "--model",
        type=Path,
        required=True,
        help="the folder export_hf wrote: holds bf16/ and bf16-noeos/",
    )
    options.add_argument(
        "--systems",
        default="ropewalk:bfloat16,transformers:bfloat16,transformers:float32",
        metavar="A,B",
        help="in the order they take turns; the first is divided by each other "
        "(default: %(default)s)",
    )
    options.add_argument(
        "--ours",
        default=OURS,
        metavar="COMMAND",
        help="how to start Ropewalk (default: %(default)s)",
    )
    add_load_options(options)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: some requests failed; 2: a system could not be measured."""
    options = parser()
    args = options.parse_args(argv)
    if args.prompt_form == "ids":
        options.error("transformers serve takes text prompts only: drop --prompt-form ids")
    try:
        systems = [
            system_from(
                spec,
                ours=args.ours,
                peer_python=args.peer_python,
                model=args.model / "bf16",
                noeos=args.model / "bf16-noeos",
            )
            for spec in args.systems.split(",")
        ]
    except ValueError as error:
        options.error(str(error))
    args.seed = args.seed or secrets.token_hex(4)
    progress = Progress(sys.stderr)
    try:
        results = asyncio.run(_measure(systems, args, progress))
    except (NoSuccess, StartFailed, Unreachable, ValueError) as error:
        progress.clear()
        print(f"load_tests.peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.clear()
        print("load_tests.peers: interrupted, nothing to report", file=sys.stderr)
        return 130
    return _report(args, results)


async def _measure(
    systems: Sequence[System], args: argparse.Namespace, progress: Progress
) -> Results:
    lines = scenarios(workloads_from(args), args.concurrency, args.rate)
    results: Results = {each.name: {line.label: [] for line in lines} for each in systems}
    with tempfile.TemporaryDirectory(prefix="ropewalk-peers-") as logs:
        for number in range(1, args.runs + 1):
            for each in systems:
                turn = f"{each.name}, run {number} of {args.runs}"
                figures = await _turn(each, lines, args, number, Path(logs), turn, progress)
                for label, result in figures.items():
                    results[each.name][label].append(result)
    progress.clear()
    return results


async def _turn(
    each: System,
    lines: Sequence[Scenario],
    args: argparse.Namespace,
    number: int,
    logs: Path,
    title: str,
    progress: Progress,
) -> Mapping[str, RunFigures]:
    """Start one system, measure every line once, stop it."""
    # One seed for all systems in a turn: everyone gets the same prompts, none gets any twice.
    prompts = PromptMaker(f"{args.seed}/{number}", "text")
    progress.start(f"{title}: starting")
    figures: dict[str, RunFigures] = {}
    async with running(each, logs, args.timeout) as started:
        server, _ = await resolve(started.server)
        await warm_up(server, max(1, *(line.concurrency for line in lines)), prompts)
        for line in lines:
            progress.start(f"{title}: {line.label}")
            figures[line.label] = await run(
                server,
                line,
                sizes_from(args),
                prompts,
                seed=f"{args.seed}/{number}",
                server_pid=started.pid,
                tick=progress.tick,
            )
    return figures


def _report(args: argparse.Namespace, results: Results) -> int:
    cells = {
        name: [Cell(label, tuple(runs)) for label, runs in lines.items()]
        for name, lines in results.items()
    }
    named = [
        Cell(f"{name} {cell.label}", cell.runs) for name, found in cells.items() for cell in found
    ]
    print(f"seed {args.seed}, {args.runs} runs in turns\n")
    print(results_table(named))
    first, *others = cells
    for other in others:
        print(f"\n{first} / {other}\n")
        print(ratio_table(cells[first], cells[other]))
    return conclude("peers", args, named)


if __name__ == "__main__":
    sys.exit(main())
