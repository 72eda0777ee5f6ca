"""What load tests in one process have in common: options, files, and how figures are written."""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from load_tests.charts import standalone
from load_tests.environment import environment
from load_tests.rounds import Clock, clock_of
from model.shapes import SHAPES
from server import placement

SCHEMA = 1


def add_options(options: argparse.ArgumentParser, *, shape: str) -> None:
    """Those about the place and the files; `shape` is the default one."""
    options.add_argument(
        "--shape", default=shape, help=f"{', '.join(SHAPES)} (default: %(default)s)"
    )
    options.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    options.add_argument(
        "--dtype",
        choices=tuple(placement.DTYPES),
        help="default: what `ropewalk serve` takes on the device",
    )
    options.add_argument(
        "--threads", type=positive, default=1, help="of the CPU kernels (default: %(default)s)"
    )
    options.add_argument(
        "--clock",
        choices=("processor", "wall"),
        help="on a CPU the time of this process alone (the default) or the clock on the wall; on "
        "CUDA the device's own, or the wall's, which has Python in it",
    )
    options.add_argument(
        "--seed", default="0", help="of the order within each round (default: %(default)s)"
    )
    options.add_argument(
        "--out", metavar="NAME", help="write NAME.json, every sample in it, and NAME.svg"
    )


def positive(text: str) -> int:
    """A whole number above 0, also as 4k. Raises ValueError."""
    number = int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    if number < 1:
        raise ValueError(f"{text} is not above 0")
    return number


def several(text: str) -> tuple[int, ...]:
    """1,8,64. Raises ValueError."""
    return tuple(positive(part) for part in text.split(","))


def place_of(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, Clock]:
    """Where and in which numbers, and by which clock. Raises CommandError."""
    device = placement.pick_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    return device, placement.pick_dtype(args.dtype, device), clock_of(args.clock, device)


def write(
    name: str,
    kind: str,
    words: Sequence[str],
    args: argparse.Namespace,
    content: Mapping[str, object],
    charts: Sequence[str] = (),
) -> None:
    """NAME.json, and NAME.svg where there are charts. Raises OSError."""
    module = kind.replace(" ", "_")
    found = {
        "schema": SCHEMA,
        "kind": f"ropewalk {kind}",
        "command": f"python -m load_tests.{module} {shlex.join(words)}".rstrip(),
        "arguments": vars(args),
        "environment": asyncio.run(_environment(args)),
        **content,
    }
    text = json.dumps(found, indent=1, allow_nan=False)
    _path(name, ".json").write_text(text + "\n", encoding="utf-8")
    if charts:
        _path(name, ".svg").write_text(standalone(charts), encoding="utf-8")
    print(f"wrote {name}.json{f' and {name}.svg' if charts else ''}", file=sys.stderr)


def markdown(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table under a header, the first `left` columns to the left."""
    header, *rest = rows
    rule = [":--" if column < left else "--:" for column in range(len(header))]
    return "\n".join(f"|{'|'.join(row)}|" for row in (header, rule, *rest))


def _path(name: str, suffix: str) -> Path:
    path = Path(name).expanduser()
    return path.with_name(path.name + suffix)


async def _environment(args: argparse.Namespace) -> dict[str, object]:
    """Of this process; no server runs."""
    facts = await environment([])
    del facts["versions"]
    device, dtype, clock = place_of(args)
    return {
        **facts,
        "torch": torch.__version__,
        "device": placement.device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "clock": clock,
    }
