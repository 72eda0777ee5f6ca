"""`ropewalk bench`: load under several variants, tables, result.json and report.html."""

import argparse
import asyncio
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from ropewalk.load_tests.client.client import Server, Unreachable, Variant, split_base_url
from ropewalk.load_tests.client.environment import environment
from ropewalk.load_tests.client.facts import Facts, facts_of, least, variants_of
from ropewalk.load_tests.client.process import StartFailed
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.types import Profile, Result, Run
from ropewalk.load_tests.report import compare, result
from ropewalk.load_tests.report.page import page
from ropewalk.load_tests.report.table import tables
from ropewalk.load_tests.run.options import DEFAULT_URL, ENCODINGS, parser, sizes_from
from ropewalk.load_tests.run.runner import NoSuccess, Runner
from ropewalk.load_tests.run.serving import (
    FAMILY,
    TRAINED_CONTEXT,
    serving,
    terminated_as_interrupted,
)
from ropewalk.load_tests.workload.loads import needed_context, points, under_profiles
from ropewalk.load_tests.workload.prompts import Form, PromptMaker
from ropewalk.load_tests.workload.workloads import Sizes, Workload

_DEFAULT_VOCAB = 32_000
BASELINE = "nope"
COULD_NOT = (NoSuccess, StartFailed, Unreachable, ValueError, OSError)


@dataclass(slots=True)
class Measured:
    """The results so far, which are reported even if the load test is interrupted."""

    variants: list[Variant] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: all were served; 1: some failed; 2: ended early; 130: interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["compare"]:
        return compare.main(words[1:])
    options = parser()
    args = options.parse_args(words)
    if complaint := _complaint(args):
        options.error(complaint)
    complete_options(args, "bench")
    command = typed_again(("ropewalk", "bench"), words, args.seed)
    measured = Measured()
    progress = Progress(sys.stderr)
    status, reason = run_to_end(partial(_measure, args, measured, progress), args.out, progress)
    if not measured.runs:
        print(f"ropewalk bench: nothing was measured: {reason}", file=sys.stderr)
        return status
    if reason:
        measured.warnings.append(f"The load test ended early ({reason}); results are incomplete.")
    served = report(as_result(command, args, measured), Path(args.out))
    return status or served


def run_to_end(
    measure: Callable[[], Coroutine[object, object, None]], out: str, progress: Progress
) -> tuple[int, str]:
    """Measures, once the folder `out` can be made: the exit status, and the reason if it ended
    early."""
    folder = Path(out)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if made:
            folder.rmdir()  # until there is something to put there
        with terminated_as_interrupted():
            asyncio.run(measure())
    except COULD_NOT as error:
        return 2, str(error)
    except KeyboardInterrupt:
        return 130, "interrupted"
    finally:
        progress.clear()
    return 0, ""


def complete_options(args: argparse.Namespace, kind: str) -> None:
    """Fill in the seed and the output folder if they were not given."""
    args.seed = args.seed or secrets.token_hex(4)
    args.out = args.out or time.strftime(f"{kind}-%Y%m%d-%H%M%S")


def report(measured: Result, folder: Path) -> int:
    """Write both files, print the tables; returns 0 if all were served, 1 if some, 2 if none."""
    folder.mkdir(parents=True, exist_ok=True)
    # First, because an output that cannot be written to must not cost the measurements.
    result.write(folder / "result.json", measured)
    (folder / "report.html").write_text(page(measured), encoding="utf-8")
    print(f"{tables(measured)}\n\n{folder / 'report.html'}\n{folder / 'result.json'}")
    failures = [outcome.error is not None for run in measured.runs for outcome in run.outcomes]
    if all(failures):
        return 2
    return 1 if any(failures) else 0


def as_result(command: str, args: argparse.Namespace, measured: Measured) -> Result:
    """Everything measured, with the first variant as the baseline."""
    variants = {
        variant.label: _about(variant, measured.facts[variant.label])
        for variant in measured.variants
    }
    return Result(
        command=command,
        arguments={name: _plain(value) for name, value in vars(args).items() if name != "api_key"},
        environment=measured.environment,
        variants=variants,
        baseline=measured.variants[0].label if len(variants) > 1 else None,
        runs=tuple(measured.runs),
        warnings=tuple(measured.warnings),
    )


async def _measure(args: argparse.Namespace, measured: Measured, progress: Progress) -> None:
    sizes = sizes_from(args)
    if args.serve == FAMILY:
        sizes = replace(sizes, trained_context=TRAINED_CONTEXT)
    context = args.context or needed_context(args.workload, sizes)
    if args.serve is not None:
        progress.start("starting servers")
    async with variants_from(args, context, progress.note) as variants:
        facts = {variant.label: await facts_of(variant) for variant in variants}
        measured.variants, measured.facts = variants, facts
        servers = {variant.server.url: variant.server for variant in variants}
        measured.environment = await environment(servers.values())
        sizes = sizes_within(sizes, facts.values())
        blocks = {label: each.block_size for label, each in facts.items()}
        runner = Runner(prompts_for(args, facts.values()), sizes, args.seed, progress, blocks)
        measured.warnings = runner.warnings
        await runner.warm_up(variants)
        contexts = {label: each.context for label, each in facts.items()}
        able = await runner.ask(variants, contexts, points(args.workload, sizes))
        if not able:
            raise ValueError(" ".join(runner.warnings))
        loads = await under_profiles(able, args.profile or (), partial(runner.throughput, variants))
        async for run in runner.measure(variants, loads, args.runs):
            measured.runs.append(run)


def sizes_within(sizes: Sizes, facts: Collection[Facts]) -> Sizes:
    """`sizes` with the servers' own numbers: the largest context, the smallest of the others.

    A load that needs the largest context leaves out variants that hold less, with a warning.
    """
    contexts = [each.context for each in facts if each.context is not None]
    return replace(
        sizes,
        context=max(contexts, default=sizes.context),
        trained_context=least(each.trained_context for each in facts) or sizes.trained_context,
    )


def prompts_for(args: argparse.Namespace, facts: Collection[Facts]) -> Callable[[str], PromptMaker]:
    """Makes, from a seed, prompts that every variant accepts."""
    form: Form = args.prompt_form or ("text" if args.dialect == "transformers" else "ids")
    vocabulary = least(each.vocab_size for each in facts) or _DEFAULT_VOCAB
    return lambda seed: PromptMaker(seed, form, vocabulary)


def _complaint(args: argparse.Namespace) -> str | None:
    """What is wrong with a combination of options that are each valid alone."""
    if args.serve is not None and (args.base_url or args.models):
        return "--serve starts servers of its own: drop --base-url and --models, or --serve"
    if args.serve is not None and (args.dialect != "openai" or not args.ignore_eos):
        return "--dialect and --no-ignore-eos are for running servers: drop them, or --serve"
    if args.serve is None and (args.encodings or args.variants or args.context):
        return "--encodings, --variants and --context need --serve, such as --serve shape:smollm2"
    unknown = [name for name in args.encodings if name not in ENCODINGS]
    if args.serve == FAMILY and unknown:
        return (
            f"the family has no {unknown[0]}, only {', '.join(ENCODINGS)}: use --serve shape:small"
        )
    random = args.serve is not None and args.serve.startswith("shape:")
    if random and any(workload.name == "extrapolate" for workload in args.workload):
        return "extrapolate needs a trained context, which random weights do not have: drop it"
    if args.prompt_form == "ids" and args.dialect == "transformers":
        return f"the {args.dialect} dialect takes text prompts only: drop --prompt-form ids"
    return None


def typed_again(program: Sequence[str], words: Sequence[str], seed: str) -> str:
    """The command that repeats this load test: with the seed, without the API key."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and not word.startswith("--api-key"):
            kept.append(word)
        skip = word == "--api-key"
    if not any(word.startswith("--seed") for word in words):
        kept += ["--seed", seed]
    return shlex.join([*program, *kept])


def _about(variant: Variant, facts: Facts) -> dict[str, object]:
    return {
        "model": variant.server.model,
        "encoding": variant.encoding,
        "setting": variant.setting,
        "url": variant.server.url,
        **asdict(facts),
    }


def _plain(value: object) -> object:
    """A value that JSON can hold."""
    match value:
        case Workload():
            return value.name
        case Profile():
            return value.label
        case Path():
            return str(value)
        case tuple() | list():
            return [_plain(each) for each in value]
        case _:
            return value


@asynccontextmanager
async def variants_from(
    args: argparse.Namespace, context: int, tell: Callable[[str], object]
) -> AsyncIterator[list[Variant]]:
    """The variants that the options name, the baseline first, while their servers run.

    Started servers have room for `context` tokens. Raises Unreachable, StartFailed and ValueError.
    """
    if args.serve is None:
        # `nope` first, if it is there; the others in the user's order.
        yield sorted(await _running(args), key=lambda variant: variant.encoding != BASELINE)
        return
    encodings = args.encodings or (() if args.variants else ENCODINGS)
    with tempfile.TemporaryDirectory(prefix="ropewalk-bench-") as logs:
        async with serving(
            args.serve,
            (BASELINE, *(name for name in encodings if name != BASELINE)),
            args.variants,
            Path(logs),
            context=context,
            timeout_s=args.timeout,
            tell=tell,
        ) as variants:
            limit = args.idle_timeout
            yield [
                replace(variant, server=replace(variant.server, idle_s=limit))
                for variant in variants
            ]


async def _running(args: argparse.Namespace) -> list[Variant]:
    variants: list[Variant] = []
    addresses = dict.fromkeys(map(split_base_url, args.base_url or [DEFAULT_URL]))
    for host, port in addresses:
        server = Server(
            host,
            port,
            dialect=args.dialect,
            ignore_eos=args.ignore_eos,
            api_key=args.api_key,
            timeout_s=args.timeout,
            idle_s=args.idle_timeout,
        )
        variants += await variants_of(server, args.models)
    if len(addresses) == 1:
        return variants
    return [
        replace(variant, label=f"{variant.label}@{variant.server.authority}")
        for variant in variants
    ]


if __name__ == "__main__":
    sys.exit(main())
