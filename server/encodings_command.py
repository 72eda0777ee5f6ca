"""`ropewalk encodings`: every positional encoding with what it does, costs and runs on here.

Prints what model/catalogue.py finds. Starts no server and opens no checkpoint.
"""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from model.attention.backends import all_backends
from model.catalogue import (
    SHAPE,
    EncodingFacts,
    Place,
    as_json,
    catalogue,
    measured_for,
)
from model.encodings.base import EncodingError, PositionalWork
from model.kernels.build import Kernels, NoKernels
from model.kernels.build import load as load_kernels
from server import placement, pull
from server.errors import CommandError
from server.patience import said_if_long

LABEL = 18  # columns of the labels at the left


def run(others: Sequence[str], *, as_lines_of_json: bool) -> int:
    """CommandError when one of the others is not there."""
    place = this_machine()
    try:
        entries = catalogue(place, others)
    except EncodingError as error:
        raise CommandError(str(error)) from error
    if as_lines_of_json:
        body = {**heading(place), "data": [as_json(entry) for entry in entries]}
        print(json.dumps(body, indent=2, ensure_ascii=False))
        return 0
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    print("\n\n".join("\n".join(lines(entry, width)) for entry in entries))
    print(f"\n{footnote(place, width)}")
    return 0


def this_machine() -> Place:
    """Device, numbers and kernels that `serve` would choose by itself."""
    device = placement.pick_device(None)
    return Place(all_backends(_kernels(device.type)), placement.pick_dtype(None, device), device)


def _kernels(device: str) -> Kernels | str:
    if device != "cpu":
        return f"the device is {device}"
    try:
        with said_if_long("compiling the CPU kernels, once for this machine"):
            return load_kernels(pull.home() / "kernels")
    except NoKernels as error:
        return str(error)


def heading(place: Place) -> dict[str, object]:
    """What the entries hold for."""
    return {
        "object": "list",
        "device": place.device.type,
        "dtype": str(place.dtype).removeprefix("torch."),
        "work_of": measured_for(),
    }


def lines(entry: EncodingFacts, width: int) -> Iterator[str]:
    """One encoding as text."""
    yield entry.name
    yield from textwrap.wrap(entry.summary, width, initial_indent="  ", subsequent_indent="  ")
    for label, text in rows(entry):
        yield from textwrap.wrap(
            text,
            width,
            initial_indent=f"  {label:<{LABEL - 2}}",
            subsequent_indent=" " * LABEL,
            break_on_hyphens=False,
        )


def rows(entry: EncodingFacts) -> Iterator[tuple[str, str]]:
    """Label and text of each row."""
    yield "hooks", ", ".join(entry.hooks) or "none"
    label = "options"
    for name, meaning in entry.options.items():
        yield label, f"{name}: {meaning}"
        label = ""
    if not entry.options:
        yield label, "none"
    yield "hard limit", entry.limit
    yield "past training", entry.beyond_trained
    if entry.unbuilt is not None:
        yield "not built", entry.unbuilt
        return
    yield "attention", taken(entry)
    yield "work per token", worked(entry)


def taken(entry: EncodingFacts) -> str:
    """The backends that take it, then those that do not and why."""
    takers = [support.backend for support in entry.backends if support.takes]
    others = [f"not {one.backend}: {one.reason}" for one in entry.backends if not one.takes]
    return "; ".join([", ".join(takers) or "none", *others])


def worked(entry: EncodingFacts) -> str:
    """FLOPs and bytes by keys seen; once where they are the same at all lengths."""
    first, *rest = entry.work.values()
    if all(work == first for work in rest):
        lengths = tuple(entry.work)
        return f"{_cost(first)} at {lengths[0]:,} to {lengths[-1]:,} keys alike"
    return "; ".join(f"{_cost(work)} at {keys:,} keys" for keys, work in entry.work.items())


def _cost(work: PositionalWork) -> str:
    if not work.flops and not work.bytes:
        return "none"
    built = f", {work.bias_built:,} values built" if work.bias_built else ""
    return f"{work.flops:,} FLOPs, {work.bytes:,} bytes{built}"


def footnote(place: Place, width: int) -> str:
    """What attention and work hold for."""
    text = (
        f"Attention: of the backends on this machine ({place.device.type}, "
        f"{str(place.dtype).removeprefix('torch.')}), those that take it. Work: one new token "
        f"through {SHAPE.layers} layers of {SHAPE.heads} heads of {SHAPE.head_dim}, in operations "
        "and in bytes read or written because of the encoding."
    )
    return textwrap.fill(text, width)
