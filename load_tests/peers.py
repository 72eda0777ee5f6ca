"""Side by side with `transformers serve`: same machine, weights, prompts and client.

Systems take turns (A B C A B C …), each alone on the machine while measured. Prompts are text,
because a peer takes nothing else, and end-of-text never ends an answer on either side.
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from load_tests.bench import COULD_NOT, Measured, as_result, complete_options, report
from load_tests.environment import environment
from load_tests.facts import Facts, arms_of
from load_tests.loads import Load, points, under_profiles
from load_tests.options import add_load_options, sizes_from
from load_tests.progress import Progress
from load_tests.prompts import PromptMaker
from load_tests.runner import Runner
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
      --profile closed:32 --runs 3 --out peers
"""


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
        help="in the order they take turns; the others are compared with the first "
        "(default: %(default)s)",
    )
    options.add_argument(
        "--ours",
        default=OURS,
        metavar="COMMAND",
        help="how to start Ropewalk (default: %(default)s)",
    )
    add_load_options(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: some requests failed; 2: a system could not be measured."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser()
    args = options.parse_args(words)
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
    complete_options(args, "peers")
    measured = Measured()
    progress = Progress(sys.stderr)
    try:
        asyncio.run(_measure(systems, args, measured, progress))
    except COULD_NOT as error:
        progress.clear()
        print(f"load_tests.peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.clear()
        print("load_tests.peers: interrupted, nothing to report", file=sys.stderr)
        return 130
    progress.clear()
    command = shlex.join(["python", "-m", "load_tests.peers", *words])
    return report(as_result(command, args, measured), Path(args.out))


async def _measure(
    systems: Sequence[System], args: argparse.Namespace, measured: Measured, progress: Progress
) -> None:
    sizes = sizes_from(args)
    runner = Runner(lambda seed: PromptMaker(seed, "text"), sizes, args.seed, progress)
    measured.warnings = runner.warnings
    measured.environment = await environment([])
    loads = await under_profiles(points(args.workload, sizes), args.profile or (), _no_sweep)
    progress.schedule(args.runs * len(systems) * len(loads))
    with tempfile.TemporaryDirectory(prefix="ropewalk-peers-") as logs:
        for block in range(args.runs):
            for each in systems:
                title = f"block {block + 1} of {args.runs}"
                progress.start(f"{title}, starting {each.name}")
                async with running(each, Path(logs), args.timeout) as started:
                    arm = replace((await arms_of(started.server, ()))[0], label=each.name)
                    if block == 0:
                        measured.arms.append(arm)
                        measured.facts[arm.label] = Facts()
                    await runner.warm_up([arm])
                    async for run in runner.block([arm], loads, block, title):
                        measured.runs.append(run)


async def _no_sweep(load: Load) -> float:
    raise ValueError("a sweep finds its rates on one server; name them: --profile poisson:2")


if __name__ == "__main__":
    sys.exit(main())
