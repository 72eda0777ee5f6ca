"""`ropewalk bench`: load against a running server, a table, then one JSON line last.

Knows the server by its base URL alone, so it measures any OpenAI-compatible one.
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from load_tests.client import DIALECTS, Server, Unreachable, get_json, split_base_url
from load_tests.measure import NoSuccess, RunFigures, run, warm_up
from load_tests.progress import Progress
from load_tests.prompts import Form, PromptMaker
from load_tests.report import DEFINITIONS, Cell, as_json, results_table, warnings, write_json
from load_tests.scenarios import WORKLOADS, Sizes, scenarios

_ALL = ("stream", "prefill", "closed", "shared-prefix")
_DEFAULT_VOCAB = 32_000

_DESCRIPTION = """\
Measure a running OpenAI-compatible server over HTTP.

Every prompt is new, decoding is greedy, each request has its own connection, and a request
counts only when exactly the requested number of tokens arrived and the stream ended properly.
The server's end-of-text is ignored; for a server without that field use --no-ignore-eos and a
model that has no end-of-text.

workloads:
"""

_EPILOG = """\
examples:
  ropewalk bench
  ropewalk bench --workload closed --concurrency 1,8,32 --runs 5 --json result.json
  ropewalk bench --workload poisson --rate 2
  ropewalk bench --dialect transformers --base-url http://127.0.0.1:8103

The table goes to standard output and the JSON line after it, so `| tail -1` is machine-readable.
Exit status: 0 when every request succeeded, 1 when some failed, 2 when nothing could be measured.
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    listed = "\n".join(f"  {name:<14} {meaning}" for name, meaning in WORKLOADS.items())
    options = argparse.ArgumentParser(
        prog="ropewalk bench",
        description=f"{_DESCRIPTION}{listed}\n  {'all':<14} {', '.join(_ALL)}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = options.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL")
    server.add_argument("--model", help="default: the first of /v1/models")
    server.add_argument("--api-key", default=os.environ.get("ROPEWALK_API_KEY"))
    server.add_argument(
        "--dialect", choices=sorted(DIALECTS), default="openai", help="default: openai"
    )
    server.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the server to generate past its end-of-text (default: yes)",
    )
    server.add_argument(
        "--server-pid", type=int, metavar="PID", help="to tell its CPU time from other processes'"
    )
    add_load_options(options)
    options.add_argument(
        "--json", type=_writable, metavar="FILE", help="also write the result here"
    )
    return options


def add_load_options(options: argparse.ArgumentParser) -> None:
    """The options that say what is sent; shared with the comparison of servers."""
    sizes = Sizes()
    load = options.add_argument_group("load")
    load.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all", help="default: all")
    load.add_argument(
        "--concurrency",
        type=_counts,
        default=(1, 8, 32),
        metavar="N,N",
        help="workers of `closed`, one line each (default: 1,8,32)",
    )
    for name, default, meaning in (
        ("--prompt-tokens", sizes.prompt_tokens, "of stream, closed and poisson"),
        ("--output-tokens", sizes.output_tokens, "of stream, closed and poisson"),
        ("--prefill-tokens", sizes.prefill_tokens, "prompt of prefill"),
        ("--prefix-tokens", sizes.prefix_tokens, "common prefix of shared-prefix"),
        ("--requests-per-worker", sizes.requests_per_worker, "of closed"),
        ("--arrivals", sizes.arrivals, "requests in a run of poisson"),
        ("--runs", 3, "of every line; the median is reported"),
    ):
        load.add_argument(
            name, type=_count, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    load.add_argument(
        "--rate", type=_rate, default=1.0, help="requests per second of poisson (default: 1)"
    )
    load.add_argument(
        "--prompt-form",
        choices=("ids", "text"),
        help="prompts as token ids (exact length) or as text (default: ids where accepted)",
    )
    load.add_argument(
        "--seed",
        help="of the prompts (default: new each time; a seed used again on the same server "
        "measures its prefix cache)",
    )
    load.add_argument(
        "--timeout", type=_rate, default=600.0, metavar="S", help="of a request (default: 600)"
    )


def sizes_from(args: argparse.Namespace) -> Sizes:
    """What the load options say about sizes."""
    return Sizes(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        prefill_tokens=args.prefill_tokens,
        prefix_tokens=args.prefix_tokens,
        requests_per_worker=args.requests_per_worker,
        rate=args.rate,
        arrivals=args.arrivals,
    )


def workloads_from(args: argparse.Namespace) -> Sequence[str]:
    """What `--workload` names; `all` is every one but poisson."""
    return _ALL if args.workload == "all" else (args.workload,)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0: all succeeded; 1: some requests failed; 2: nothing measured."""
    options = parser()
    args = options.parse_args(argv)
    try:
        host, port = split_base_url(args.base_url)
    except ValueError as error:
        options.error(str(error))
    dialect = DIALECTS[args.dialect]
    if args.prompt_form == "ids" and not dialect.token_ids:
        options.error(f"the {dialect.name} dialect takes text prompts only: drop --prompt-form ids")
    server = Server(host, port, dialect, args.model, args.ignore_eos, args.api_key, args.timeout)
    args.seed = args.seed or secrets.token_hex(4)
    progress = Progress(sys.stderr)
    try:
        cells = asyncio.run(_measure(server, args, progress))
    except (NoSuccess, Unreachable, ValueError) as error:
        progress.clear()
        print(f"ropewalk bench: {args.base_url}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.clear()
        print("ropewalk bench: interrupted, nothing to report", file=sys.stderr)
        return 130
    return _report(args, cells)


async def _measure(server: Server, args: argparse.Namespace, progress: Progress) -> list[Cell]:
    server, vocab_size = await resolve(server)
    args.model = server.model
    form: Form = args.prompt_form or ("ids" if server.dialect.token_ids else "text")
    prompts = PromptMaker(args.seed, form, vocab_size)
    lines = scenarios(workloads_from(args), args.concurrency, args.rate)
    sizes = sizes_from(args)
    progress.start("warming up")
    await warm_up(server, max(1, *(line.concurrency for line in lines)), prompts)
    cells: list[Cell] = []
    for line in lines:
        runs: list[RunFigures] = []
        for number in range(1, args.runs + 1):
            progress.start(f"{line.label}, run {number} of {args.runs}")
            figures = await run(
                server,
                line,
                sizes,
                prompts,
                seed=f"{args.seed}/{number}",
                server_pid=args.server_pid,
                tick=progress.tick,
            )
            runs.append(figures)
        cells.append(Cell(line.label, tuple(runs)))
    progress.clear()
    return cells


async def resolve(server: Server) -> tuple[Server, int]:
    """The server with a model named, and how many token ids it has. Raises Unreachable."""
    if not server.dialect.token_ids:  # its /v1/models lists downloads, not what it serves
        return server, _DEFAULT_VOCAB
    models = (await get_json(server, "/v1/models")).get("data") or []
    wanted = server.model or (models[0]["id"] if models else None)
    card = next((card for card in models if card["id"] == wanted), None)
    if card is None:
        names = ", ".join(card["id"] for card in models) or "none"
        raise Unreachable(f"no model {wanted!r} there; --model takes one of: {names}")
    found = replace(server, model=wanted)
    return found, int(card.get("vocab_size") or _DEFAULT_VOCAB)


def _report(args: argparse.Namespace, cells: Sequence[Cell]) -> int:
    print(f"model {args.model or '(the only one)'} at {args.base_url}, seed {args.seed}\n")
    print(results_table(cells))
    return conclude("bench", args, cells)


def conclude(kind: str, args: argparse.Namespace, cells: Sequence[Cell]) -> int:
    """Print what follows the tables, the JSON line last, and write it; the exit status."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name != "api_key"
    }
    result = as_json(kind, arguments, cells)
    print(f"\n{DEFINITIONS}")
    for warning in warnings(cells):
        print(f"! {warning}")
    if args.json is not None:
        write_json(args.json, result)
    print(json.dumps(result))
    return 1 if any(run.failed for cell in cells for run in cell.runs) else 0


def _writable(text: str) -> Path:
    """Asked before the measurement: its result should not be lost at the end."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {path.parent} to write {path.name} to"
        )
    return path


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 up")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
