"""`ropewalk encodings`: every positional encoding, with what it does, costs and runs on here.

Prints what model/catalogue.py finds. Starts no server and opens no checkpoint.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from ropewalk.cache.types import BLOCK_SIZE, Op
from ropewalk.model.catalogue import (
    SHAPE,
    Ability,
    EncodingFacts,
    Place,
    as_json,
    catalogue,
    listing,
    measured,
    timed_trial,
)
from ropewalk.model.encodings.base import EncodingError
from ropewalk.model.encodings.common.cost import PositionalWork
from ropewalk.model.kernels.backends import all_backends
from ropewalk.report.table import aligned
from ropewalk.server import hardware
from ropewalk.server.errors import CommandError
from ropewalk.server.launch.load_model import find_kernels
from ropewalk.server.terminal import line_width, said_if_long

LABEL = 18  # width of the labels at the left


def run(others: Sequence[str], *, operations: bool, as_lines_of_json: bool) -> None:
    """With `operations`, what can be done to cached entries, run and timed.

    Raises CommandError when one of `others` does not exist.
    """
    place, width = this_machine(), line_width()
    try:
        entries = catalogue(place, others)
    except EncodingError as error:
        raise CommandError(str(error)) from error
    if operations:
        trial = timed_trial(place)
        with said_if_long("running each operation several times"):
            entries = [measured(entry, trial) for entry in entries]
    if as_lines_of_json:
        body = listing(place, map(as_json, entries))
        print(json.dumps(body, indent=2, ensure_ascii=False))
    elif operations:
        print("\n".join(matrix(entries)))
        print("\n" + "\n".join(reasons(entries, width)))
        print(f"\n{matrix_footnote(place, width)}")
    else:
        print("\n\n".join("\n".join(lines(entry, width)) for entry in entries))
        print(f"\n{footnote(place, width)}")


def this_machine() -> Place:
    """Device, dtype and backends that `serve` would choose by default."""
    device = hardware.pick_device(None)
    return Place(all_backends(find_kernels(device)), hardware.pick_dtype(None, device), device)


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
    if entry.in_python:
        yield (
            "in Python",
            f"{', '.join(entry.in_python)}: each step leaves the CPU's kernels for it",
        )
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
    """The backends that support it, then those that do not, with the reason."""
    takers = [support.backend for support in entry.backends if support.takes]
    others = [f"not {one.backend}: {one.reason}" for one in entry.backends if not one.takes]
    return "; ".join([", ".join(takers) or "none", *others])


def worked(entry: EncodingFacts) -> str:
    """FLOPs and bytes by number of keys; one entry if they are the same at all lengths."""
    first, *rest = entry.work.values()
    if all(work == first for work in rest):
        lengths = tuple(entry.work)
        return f"{_cost(first)} at {lengths[0]:,} to {lengths[-1]:,} keys"
    return "; ".join(f"{_cost(work)} at {keys:,} keys" for keys, work in entry.work.items())


def _cost(work: PositionalWork) -> str:
    if not work.flops and not work.bytes:
        return "none"
    built = f", {work.bias_built:,} values built" if work.bias_built else ""
    return f"{work.flops:,} FLOPs, {work.bytes:,} bytes{built}"


def footnote(place: Place, width: int) -> str:
    """What the rows "attention" and "work" refer to."""
    text = (
        f"Attention: backends on this machine ({place.device.type}, "
        f"{hardware.dtype_name(place.dtype)}) that support the encoding. Work: arithmetic "
        "operations, and bytes read or written, that the encoding adds for one new token in "
        f"{SHAPE.num_layers} layers with {SHAPE.num_heads} heads of dimension {SHAPE.head_dim}."
    )
    return textwrap.fill(text, width)


def matrix(entries: Sequence[EncodingFacts]) -> list[str]:
    """Encodings by operations: the capability, and below it the measured time."""
    table = [["", *(op.value for op in Op)]]
    for entry in entries:
        for label, abilities in by_storage(entry):
            table.append([label, *(ability.capability.value for ability in abilities)])
            table.append(["", *(spent(ability) for ability in abilities)])
    return aligned(table, left=len(table[0]))


def by_storage(entry: EncodingFacts) -> list[tuple[str, list[Ability]]]:
    """Abilities by key storage, which the label names if there are several."""
    by_value = groupby(entry.operations, lambda ability: ability.key_storage.value)
    groups = [(storage, list(some)) for storage, some in by_value]
    if len(groups) == 1:
        return [(entry.name, groups[0][1])]
    return [(f"{entry.name}, {storage}", some) for storage, some in groups]


def spent(ability: Ability) -> str:
    """The time; as `0 (time)` where only bookkeeping took it, as no stored entry is touched."""
    if ability.cost is None:
        return "-"
    time = duration(ability.cost.seconds)
    return time if ability.cost.bytes else f"0 ({time})"


def duration(seconds: float) -> str:
    """At least two digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{int(seconds < 10 * size)}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def reasons(entries: Sequence[EncodingFacts], width: int) -> Iterator[str]:
    """Why operations are impossible, each reason once per encoding."""
    for entry in entries:
        for reason in dict.fromkeys(one.reason for one in entry.operations if one.reason):
            yield from textwrap.wrap(f"{entry.name}: impossible, because {reason}", width)
        if entry.unbuilt is not None:
            yield from textwrap.wrap(f"{entry.name}: not built: {entry.unbuilt}", width)


def matrix_footnote(place: Place, width: int) -> str:
    """What the capabilities and times refer to."""
    heads = f"{SHAPE.num_heads} heads of dimension {SHAPE.head_dim}"
    where = f"{place.device.type}, {hardware.dtype_name(place.dtype)}"
    text = (
        f"Time to move, share, drop or append 1,000 tokens, in whole blocks of {BLOCK_SIZE}, in a "
        f"cache of {SHAPE.num_layers} layers with {heads} ({where}): the median of several runs. "
        "0 means that no stored entry was read or written; the time in brackets is bookkeeping. "
        "The entries of new tokens themselves are not counted. Capabilities concern only "
        "positions: after an eviction or a move, later entries still depend on the tokens that "
        "preceded them when they were computed, under every encoding."
    )
    return textwrap.fill(text, width)
