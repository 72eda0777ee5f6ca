"""How long one client's small requests take beside another client's list of many prompts.

    python -m ropewalk.load_tests.run.fairness

Starts a server with two API keys. With one key it posts all prompts as a single request; with the
other, small requests follow one another until the list is answered. They are timed alone first.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ropewalk.load_tests.client.client import (
    Server,
    Unreachable,
    complete,
    fetch,
    get_json,
)
from ropewalk.load_tests.client.process import ServerProcess, StartFailed
from ropewalk.load_tests.common.progress import Progress
from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.run.options import add, count, program
from ropewalk.load_tests.run.serving import serve_alone
from ropewalk.load_tests.workload.prompts import PromptMaker

_KEYS = ("few", "many")
_ALONE = 10  # requests
_PATIENCE_S = 3600.0  # with the list
_PAUSE_S = 0.2  # between small requests: they are a person's, not a load


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    words = [args.model, "--no-access-log", "--log-level", "warning"]
    words += ["--max-queue", str(2 * args.prompts), "--max-queue-time", str(_PATIENCE_S)]
    words += [word for key in _KEYS for word in ("--api-key", key)]
    try:
        with serve_alone(*words) as (server, started):
            alone, beside = asyncio.run(_measure(args, server, started))
    except (StartFailed, Unreachable) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"alone: {summary(alone)}\nbeside {args.prompts} prompts: {summary(beside)}")
    return 0


def summary(seconds: Sequence[float]) -> str:
    """Of the times of some small requests."""
    return (
        f"a small request takes {median(seconds):.2f} s, at most {max(seconds):.2f} s "
        f"({len(seconds)} requests)"
    )


async def _measure(
    args: argparse.Namespace, server: Server, started: ServerProcess
) -> tuple[list[float], list[float]]:
    progress = Progress(sys.stderr)
    progress.start("starting the server")
    await started.answers(server, progress.note)
    few, many = (replace(server, api_key=key) for key in _KEYS)
    many = replace(many, timeout_s=_PATIENCE_S, idle_s=_PATIENCE_S)
    (model,) = (await get_json(few, "/v1/models"))["data"]
    prompts = PromptMaker("fairness", "ids", model["vocab_size"])

    async def time_small() -> float:
        request = Request(prompts.prompt(args.small_tokens), args.small_tokens, args.output_tokens)
        outcome = await complete(few, request)
        if outcome.error is not None:
            raise Unreachable(f"a small request failed: {outcome.error}")
        await asyncio.sleep(_PAUSE_S)
        return outcome.ended - outcome.sent

    progress.start(f"{_ALONE} small requests")
    alone = [await time_small() for _ in range(_ALONE)]
    progress.start(f"small requests beside {args.prompts} prompts")
    body = {
        "prompt": [prompts.prompt(args.prompt_tokens) for _ in range(args.prompts)],
        "max_tokens": args.list_output_tokens,
    }
    answered = asyncio.create_task(fetch(many, "POST", "/v1/completions", body))
    await asyncio.sleep(_PAUSE_S)
    beside = []
    while not answered.done():
        beside.append(await time_small())
        progress.note(f"{len(beside)} small requests beside {args.prompts} prompts")
    await answered
    progress.clear()
    if not beside:
        raise Unreachable("the list was answered before a small request; ask for more --prompts")
    return alone, beside[:-1] or beside  # the last may have ended after the list


def _parser() -> argparse.ArgumentParser:
    options = program("python -m ropewalk.load_tests.run.fairness", __doc__)
    model = "what to serve, as `ropewalk serve` takes it (%(default)s)"
    add(options, "--model MODEL", str, "smollm2", model)
    add(options, "--prompts N", count, 1024, "in the list (%(default)s)")
    add(options, "--prompt-tokens N", count, 100, "of each of them (%(default)s)")
    add(options, "--list-output-tokens N", count, 16, "of each answer to them (%(default)s)")
    add(options, "--small-tokens N", count, 8, "of a small request's prompt (%(default)s)")
    add(options, "--output-tokens N", count, 4, "of its answer (%(default)s)")
    return options


if __name__ == "__main__":
    sys.exit(main())
