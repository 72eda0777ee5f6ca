"""What load tests within one process share: options and files."""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ropewalk.load_tests.client.environment import environment
from ropewalk.load_tests.common.rounds import Clock, clock_of
from ropewalk.load_tests.report.charts import side_by_side
from ropewalk.load_tests.run.options import add, count
from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.loading.random_weights import SHAPES
from ropewalk.model.weights.base import CheckpointError
from ropewalk.report.figure import Picture
from ropewalk.report.svg import svg
from ropewalk.server import hardware
from ropewalk.server.errors import CommandError

SCHEMA = 1

M = TypeVar("M")


def run(
    program: str,
    options: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], M],
    report: Callable[[M, Sequence[str], argparse.Namespace], int],
) -> int:
    """Measure and report; returns the exit status of `report`, or 2 after printing an error."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = options.parse_args(words)
    try:
        measured = measure(args)
    except (CommandError, CheckpointError, EncodingError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return report(measured, words, args)


def add_options(options: argparse.ArgumentParser) -> None:
    """Options of the shape, the place and the files."""
    add_shape(options, "small")
    add_place(options)
    add(options, "--out NAME", str, None, "write NAME.json, every sample in it, and NAME.svg")


def add_shape(options: argparse.ArgumentParser, shape: str) -> None:
    add(options, "--shape NAME", str, shape, f"{', '.join(SHAPES)} (default: %(default)s)")


def add_place(options: argparse.ArgumentParser) -> None:
    """Options of device, dtype, threads and clock, for `place_of`; and the seed of the order."""
    add_device(options)
    add_threads(options)
    options.add_argument(
        "--clock",
        choices=("processor", "wall"),
        help="processor: on a CPU this process's own time, on CUDA the device's (default); wall: "
        "elapsed time, which on CUDA includes Python",
    )
    add(options, "--seed TEXT", str, "0", "seed of the order in each round (default: %(default)s)")


def add_device(options: argparse.ArgumentParser) -> None:
    options.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    options.add_argument(
        "--dtype",
        choices=tuple(hardware.DTYPES),
        help="default: the one that `ropewalk serve` uses on the device",
    )


def add_threads(options: argparse.ArgumentParser) -> None:
    add(options, "--threads N", count, 1, "threads of the CPU kernels (default: %(default)s)")


def place_of(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, Clock]:
    """Device, dtype and clock; sets the number of threads. Raises CommandError."""
    device, dtype = device_of(args)
    return device, dtype, clock_of(args.clock, device)


def device_of(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """For what has clocks of its own. Sets the number of threads. Raises CommandError."""
    device = hardware.pick_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    return device, hardware.pick_dtype(args.dtype, device)


def write(
    name: str,
    kind: str,
    words: Sequence[str],
    args: argparse.Namespace,
    content: Mapping[str, object],
    charts: Sequence[Picture] = (),
) -> None:
    """Write NAME.json, and NAME.svg if there are charts. Raises OSError."""
    save(name, {**heading(kind, words, args), **content})
    if charts:
        text = svg(side_by_side(charts), "a")
        path_of(name, ".svg").write_text(text + "\n", encoding="utf-8")
    print(f"wrote {name}.json{f' and {name}.svg' if charts else ''}", file=sys.stderr)


def heading(kind: str, words: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """The beginning of a file: what was run, and where."""
    module = "gpu.check" if kind == "gpu check" else f"micro.{kind.replace(' ', '_')}"
    return {
        "schema": SCHEMA,
        "kind": f"ropewalk {kind}",
        "command": f"python -m ropewalk.load_tests.{module} {shlex.join(words)}".rstrip(),
        "arguments": vars(args),
        "environment": asyncio.run(_environment(args)),
    }


def save(name: str, found: Mapping[str, object]) -> None:
    """Write NAME.json, replacing an existing one. Raises OSError."""
    text = json.dumps(found, indent=1, allow_nan=False)
    new = path_of(name, ".json.new")
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(path_of(name, ".json"))  # atomic, so a run that is cut short leaves a complete file


def path_of(name: str, suffix: str) -> Path:
    path = Path(name).expanduser()
    return path.with_name(path.name + suffix)


async def _environment(args: argparse.Namespace) -> dict[str, object]:
    """The environment of this process, without servers."""
    facts = await environment([])
    del facts["versions"]
    device, dtype = device_of(args)
    return {
        **facts,
        "torch": torch.__version__,
        "device": hardware.device_name(device),
        "dtype": hardware.dtype_name(dtype),
        **({"clock": clock_of(args.clock, device)} if "clock" in args else {}),
    }
