"""The argparse options of `ropewalk bench`; other commands share those about the load."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ropewalk.load_tests.client.client import DIALECTS, split_base_url
from ropewalk.load_tests.common.parser import Parser
from ropewalk.load_tests.common.statistics import parse_slo
from ropewalk.load_tests.common.types import Profile
from ropewalk.load_tests.run.serving import parse_serve, parse_setting, setting_names
from ropewalk.load_tests.workload.profiles import PROFILES, parse_profile
from ropewalk.load_tests.workload.workloads import WORKLOADS, Sizes, Workload, workload_from

_ENCODINGS = Path(__file__).parents[2] / "model" / "encodings"  # importing it takes a second
# Of the bundled family: what is compared unless others are named.
ENCODINGS = ("nope", "rope", "t5", "alibi", "learned", "sinusoidal")
DEFAULT_URL = "http://127.0.0.1:8000"

# The whole numbers in `Sizes` that a user may set, besides the contexts.
_COUNTS = {
    "prompt_tokens": "prompt length in stream, cancel and chat's first turn",
    "output_tokens": "answer length in stream, cancel, chat and files",
    "prefill_tokens": "prompt length in prefill",
    "prefix_tokens": "length of each common prefix in shared-prefix",
    "prefixes": "number of prefixes in shared-prefix",
    "requests_per_prefix": "requests with each prefix in shared-prefix",
    "requests_per_worker": "requests of each worker in a run of sync or closed:N; longctx and "
    "extrapolate send 1 in sync, shared-prefix and files their own number",
    "arrivals": "requests in a run of poisson or gamma, but not of shared-prefix and files",
}

_DESCRIPTION = """\
Measure the speed of servers, and what positional encodings cost on them.

The servers are already running (--base-url), or the benchmark starts and stops its own (--serve),
which serve one decoder under each encoding. Every prompt is new, decoding is greedy, and a request
counts only if exactly the requested number of tokens arrived and the stream ended properly. The
variants (whatever is compared) take turns in random order, several times. Each difference between
variants comes with an interval; one that could be chance is reported as "no difference".
"""

_EPILOG = """\
examples:
  ropewalk bench
  ropewalk bench --workload chat --profile closed:8 --models smollm2 --slo ttft=2s,tpot=100ms
  ropewalk bench --base-url http://127.0.0.1:8000 --base-url http://127.0.0.1:9000
  ropewalk bench --serve shape:smollm2 --workload longctx --contexts 512,2k
  ropewalk bench --serve shape:smollm2 --variants t5:window,t5:table,t5:materialised,rope:block
  ropewalk bench --profile sweep --arrivals 64
  ropewalk bench compare before/result.json after/result.json --fail-on 'tpot_p99>+10%'
  ropewalk bench --profile-step --serve shape:smollm2
                               where the time of a step goes; see also --profile-step --help

Tables go to standard output, progress to standard error. The folder of --out gets result.json,
with every sample, and report.html, which needs no other file.
Exit status: 0 when every request was served, 1 when some failed, 2 when nothing was measured or
the load test ended early, 130 when it was interrupted.
"""


def parser() -> argparse.ArgumentParser:
    workloads = "".join(f"  {name:<14} {each.help}\n" for name, each in WORKLOADS.items())
    profiles = "".join(f"  {name:<22} {meaning}\n" for name, meaning in PROFILES.items())
    options = Parser(
        prog="ropewalk bench",
        description=(
            f"{_DESCRIPTION}\nworkloads:\n{workloads}"
            f"  {'file:PATH':<14} prompts from a file, one JSON object per line\n"
            f"\nprofiles:\n{profiles}"
        ),
        epilog=_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    _add_server_options(options)
    _add_variant_options(options)
    add_load_options(options)
    good = "report goodput: requests that meet all objectives, such as ttft=200ms,tpot=50ms"
    add(options, "--slo OBJECTIVES", _slo, None, good)
    return options


def add_load_options(options: argparse.ArgumentParser) -> None:
    """Options of the load; shared with the comparison of servers."""
    sizes = Sizes()
    load = options.add_argument_group("load")
    above = "one or more of those above"
    add(load, "--workload NAME,...", _workloads, "stream", f"{above} (default: stream)")
    add(load, "--profile PROFILE,...", _profiles, None, f"{above} (default: the workload's own)")
    add(load, "--runs N", count, 5, "runs of every variant (default: 5)")
    lengths = "lengths in longctx (default: 512,2k,8k)"
    add(load, "--contexts N,...", counts, sizes.contexts, lengths)
    for name, meaning in _COUNTS.items():
        default = getattr(sizes, name)
        flag = f"--{name.replace('_', '-')} N"
        add(load, flag, count, default, f"{meaning} (default: {default})")
    load.add_argument(
        "--prompt-form",
        choices=("ids", "text"),
        help="send prompts as token ids (exact length) or text (default: ids where accepted)",
    )
    load.add_argument(
        "--seed",
        help="seed of prompts, arrivals and order (default: a new one; a seed used again on a "
        "server that cannot flush its prefix cache measures cache hits)",
    )
    whole = "seconds in which an answer must be complete (default: 600)"
    add(load, "--timeout S", _seconds, 600.0, whole)
    add(load, "--idle-timeout S", _seconds, 120.0, "seconds allowed without data (default: 120)")
    options.add_argument(
        "--out",
        metavar="FOLDER",
        help="where result.json and report.html go (default: a folder named after the time)",
    )


def sizes_from(args: argparse.Namespace) -> Sizes:
    return Sizes(contexts=args.contexts, **{name: getattr(args, name) for name in _COUNTS})


def _add_server_options(options: argparse.ArgumentParser) -> None:
    server = options.add_argument_group("servers")
    server.add_argument(
        "--base-url",
        type=checked(_base_url),
        action="append",
        metavar="URL",
        help=f"a running server; repeat to compare several (default: {DEFAULT_URL})",
    )
    what = "start servers instead: `family` for the bundled models, shape:NAME or the path of a "
    what += "config.json for random weights of that shape"
    add(server, "--serve WHAT", parse_serve, None, what)
    room = "context length of started servers (default: what the workload needs)"
    add(server, "--context N", count, None, room)
    server.add_argument(
        "--api-key",
        default=os.environ.get("ROPEWALK_API_KEY"),
        metavar="KEY",
        help="sent to the servers (default: the environment variable ROPEWALK_API_KEY)",
    )
    server.add_argument(
        "--dialect", choices=DIALECTS, default="openai", help="API (default: openai)"
    )
    server.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the server to generate past end-of-text (default: yes); --no-ignore-eos is for "
        "models without end-of-text",
    )


def _add_variant_options(options: argparse.ArgumentParser) -> None:
    variants = options.add_argument_group("variants: what is compared, with nope as the baseline")
    every, settings = ",".join(ENCODINGS), ", ".join(setting_names())
    encodings = f"for --serve, also package.module:Class (default: the family's, {every})"
    add(variants, "--encodings NAME,...", _encodings, (), encodings)
    apart = f"for --serve, one server each: {settings}"
    add(variants, "--variants NAME:SETTING,...", _variants, (), apart)
    models = "models of running servers (default: the first one of each)"
    add(variants, "--models NAME,...", _names, (), models)


def program(
    name: str, description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """A parser for a program that is called by that name; its texts keep their lines."""
    return argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add(
    group: argparse._ActionsContainer,
    flag: str,
    parse: Callable[[str], object],
    default: object,
    meaning: str,
) -> None:
    """An option parsed by `parse`, whose ValueError or OSError argparse prints unchanged."""
    name, metavar = flag.split()
    group.add_argument(name, type=checked(parse), metavar=metavar, help=meaning, default=default)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    """`parse` with its ValueError or OSError turned into one that argparse prints unchanged."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{error.filename}: {error.strerror}") from None
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _slo(text: str) -> str:
    parse_slo(text)
    return text


def _base_url(text: str) -> str:
    split_base_url(text)
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in names:
        raise ValueError(f"{text!r} has an empty name")
    return names


def _encodings(text: str) -> tuple[str, ...]:
    known = [path.stem for path in sorted(_ENCODINGS.glob("[a-z]*.py")) if path.stem != "base"]
    for name in (names := _names(text)):
        if name not in known and ":" not in name:
            raise ValueError(
                f"there is no encoding {name!r}; use some of {', '.join(known)}, or "
                "package.module:Class"
            )
    return names


def _variants(text: str) -> tuple[str, ...]:
    for name in (names := _names(text)):
        parse_setting(name)
    return names


def _workloads(text: str) -> tuple[Workload, ...]:
    found = tuple(workload_from(name) for name in _names(text))
    if len({each.name for each in found}) < len(found):
        raise ValueError(f"{text!r} has two files of one name, and names label runs: rename one")
    return found


def _profiles(text: str) -> tuple[Profile | Literal["sweep"], ...]:
    return tuple(parse_profile(name) for name in _names(text))


def count(text: str) -> int:
    """A whole number from 1 up; 2k is 2,048. Raises argparse's own error."""
    match = re.fullmatch(r"([1-9]\d*)(k?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up, such as 8 or 2k")
    return int(match[1]) * (1024 if match[2] else 1)


def counts(text: str) -> tuple[int, ...]:
    """1,8,64: numbers as `count` reads them, without repetitions."""
    return tuple(dict.fromkeys(count(part.strip()) for part in text.split(",")))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return value
