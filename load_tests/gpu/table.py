"""The results of `gpu_check` as tables and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ropewalk.load_tests.common.rounds import interval_json
from ropewalk.load_tests.gpu.parts import (
    BY_TORCH,
    OWN,
    WAITED,
    Cell,
    Encodings,
    Figure,
    Found,
    LeftOut,
    Work,
)
from ropewalk.load_tests.gpu.peer import PEER
from ropewalk.load_tests.micro.roofline import Ceiling
from ropewalk.load_tests.micro.step_cost import table
from ropewalk.load_tests.report.formatting import digits, fine_milliseconds, percent
from ropewalk.report.table import markdown

# What is measured beside the usual way, and its column.
_OTHERWISE: dict[Work, tuple[str, str]] = {
    "pass": (BY_TORCH, "torch's linear layers, ms"),
    "step": (WAITED, "not overlapped, ms"),
}
_TITLES: dict[Work, str] = {
    "pass": "Decoding: one decoder pass, which gives each request its next token",
    "step": "Serving: one step of the engine, with scheduling and sampling",
    "prefill": "One prompt: one decoder pass over all its tokens",
}


def tables(ceiling: Ceiling, found: Sequence[Found]) -> str:
    """In short: medians, and a line for each missing figure."""
    copy, products = ceiling.bytes_per_s / 1e9, ceiling.operations_per_s / 1e12
    parts = [f"Copy: {digits(copy)} GB/s, read and written; product: {digits(products)} TFLOP/s."]
    figures = [each for each in found if isinstance(each, Figure)]
    for work, title in _TITLES.items():
        if any(each.work == work for each in figures):
            parts.append(f"{title}\n\n{_figures(work, figures)}")
    for shape in dict.fromkeys(each.shape for each in found if isinstance(each, Encodings)):
        of_shape = [each for each in found if isinstance(each, Encodings) and each.shape == shape]
        cell = of_shape[0].cell
        title = f"Encodings: {shape}, batch {cell.batch}, context {cell.context:,}"
        parts.append(f"{title}\n\n{table({each.work: each.costs for each in of_shape})}")
    left_out = [_told(each) for each in found if isinstance(each, LeftOut)]
    if left_out:
        parts.append("\n".join(["Left out:", "", *left_out]))
    return "\n\n".join(parts)


def as_json(ceiling: Ceiling, found: Iterable[Found]) -> dict[str, object]:
    """The results by kind, in the order of measurement."""
    content: dict[str, list[object]] = {"figures": [], "encodings": [], "left_out": []}
    for each in found:
        if isinstance(each, Figure):
            content["figures"].append(asdict(each) | {"seconds": interval_json(each.seconds)})
        elif isinstance(each, Encodings):
            costs = [cost.as_json() for cost in each.costs]
            content["encodings"].append(asdict(each) | {"costs": costs})
        else:
            content["left_out"].append(asdict(each))
    return {"ceiling": asdict(ceiling), **content}


def _figures(work: Work, figures: Sequence[Figure]) -> str:
    system, column = _OTHERWISE.get(work, ("", ""))
    own, otherwise, peer = (
        {(each.shape, each.cell): each for each in figures if (each.work, each.system) == key}
        for key in ((work, OWN), (work, system), (work, PEER))
    )
    bound = ("roofline, ms", "of roofline") if work != "step" else ()
    beside = (*bound, column) if otherwise else bound
    head = ["shape", "batch", "context", "ms", *beside, "tokens/s", f"{PEER}, ms", "times as fast"]
    rows = [head]
    for shape, cell in dict.fromkeys([*own, *peer]):
        ours, theirs = own.get((shape, cell)), peer.get((shape, cell))
        rows.append(
            [
                *(shape, str(cell.batch), f"{cell.context:,}", _ms(ours)),
                *(_bound(ours) if bound else ()),
                *([_ms(otherwise.get((shape, cell)))] if otherwise else ()),
                _speed(work, cell, ours),
                _ms(theirs),
                digits(theirs.seconds.value / ours.seconds.value) if ours and theirs else "",
            ]
        )
    ways = dict.fromkeys(each.how for each in peer.values() if each.how)
    told = [f"{PEER}: {'; '.join(ways)}."] if ways else []
    told += [f"{OWN}, {_where(*key)}: {each.how}." for key, each in own.items() if each.how]
    return "\n\n".join([markdown(rows), *told])


def _ms(found: Figure | None) -> str:
    return "" if found is None else fine_milliseconds(found.seconds.value)


def _bound(found: Figure | None) -> tuple[str, str]:
    if found is None or found.least is None:
        return "", ""
    share = found.least / found.seconds.value
    return fine_milliseconds(found.least), f"{percent(share)} %"


def _speed(work: Work, cell: Cell, found: Figure | None) -> str:
    """Tokens/s: a prompt's pass computes all its tokens, any other pass one per request."""
    if found is None:
        return ""
    tokens = cell.tokens if work == "prefill" else cell.batch
    return digits(tokens / found.seconds.value)


def _told(each: LeftOut) -> str:
    return f"- {each.system}, {each.work}: {_where(each.shape, each.cell)}: {each.reason}"


def _where(shape: str, cell: Cell | None) -> str:
    return f"{shape}, batch {cell.batch}, context {cell.context:,}" if cell else shape
