"""Tables of an evaluation in Markdown. Knows no pictures."""

from collections.abc import Sequence

from ropewalk.model.family.evaluation.losses import LossBin
from ropewalk.model.family.evaluation.report.findings import shipped
from ropewalk.model.family.evaluation.report.words import (
    MISSING,
    interval,
    millions,
    share,
    signed,
    small,
    table,
)
from ropewalk.model.family.evaluation.results import Measured


def losses(members: Sequence[Measured]) -> str:
    """Nats per token in every bin of trained positions."""
    known = [one for one in shipped(members) if one.losses is not None]
    bins = _bins(known, beyond=False)
    if not bins:
        return MISSING
    rows = [[one.label, *(_loss(one, edges) for edges in bins)] for one in known]
    return table(["position", *(f"{start:,} to {stop:,}" for start, stop in bins)], rows)


def beyond(members: Sequence[Measured]) -> str:
    """Nats per token past the trained length, and below each row the cost of distance."""
    known = [one for one in shipped(members) if one.losses is not None]
    bins = _bins(known, beyond=True)
    if not bins:
        return MISSING
    rows = []
    for one in known:
        rows.append([one.label, *(_loss(one, edges) for edges in bins)])
        found = [_bin(one, edges) for edges in bins]
        costs = [
            f"{signed(each.change.value)} ({interval(each.change)})"
            if each is not None and each.change is not None
            else ""
            for each in found
        ]
        if any(costs):
            rows.append(["cost of distance", *costs])
    return table(["position", *(f"{start:,} to {stop:,}" for start, stop in bins)], rows)


def _bins(members: Sequence[Measured], *, beyond: bool) -> list[tuple[int, int]]:
    found = {
        (each.start, each.stop)
        for one in members
        if one.losses is not None
        for each in one.losses.bins
        if (each.start >= one.losses.trained) is beyond
    }
    return sorted(found)


def _bin(one: Measured, edges: tuple[int, int]) -> LossBin | None:
    bins = one.losses.bins if one.losses is not None else ()
    return next((each for each in bins if (each.start, each.stop) == edges), None)


def _loss(one: Measured, edges: tuple[int, int]) -> str:
    found = _bin(one, edges)
    if found is not None:
        return share(found.loss)
    return "refused" if one.losses is not None and one.losses.refusal else MISSING


def seeds(one: Measured, members: Sequence[Measured]) -> str:
    """Held-out losses of other seeds, with the tokens of their training where these differ."""
    found = [
        f"{own.held_out.loss.value:.2f}"
        + ("" if _tokens(own) == _tokens(one) else f" at {_tokens(own)}")
        for own in members
        if own.label == one.label and own.seed is not None and own.held_out is not None
    ]
    return ", ".join(found) or MISSING


def _tokens(one: Measured) -> str:
    """The tokens it was trained with."""
    return millions(one.curve.tokens) if one.curve and one.curve.trained else MISSING


def recalls(members: Sequence[Measured], kind: str) -> str:
    """Shares of right answers, a row per length and encoding."""
    known = [one for one in shipped(members) if one.recalls is not None]
    cells = {
        (one.label, cell.length, cell.wanted): cell.share
        for one in known
        if one.recalls is not None
        for cell in one.recalls.cells
        if cell.kind == kind
    }
    if not cells:
        return MISSING
    distances = sorted({distance for _, _, distance in cells})
    lengths = sorted({length for _, length, _ in cells})
    rows = []
    for length in lengths:
        fitting = {distance for _, of, distance in cells if of == length}
        for one in known:
            rows.append(
                [
                    f"{length:,} tokens, {one.label}",
                    *(
                        share(cells[one.label, length, distance])
                        if (one.label, length, distance) in cells
                        else "refused"
                        if distance in fitting
                        else ""
                        for distance in distances
                    ),
                ]
            )
    return table(["distance", *(f"{distance:,}" for distance in distances)], rows)


def training(members: Sequence[Measured]) -> str:
    """Every training with its length and final losses, longest first."""
    known = [(one.name, one.curve) for one in members if one.curve and one.curve.trained]
    rows = []
    for name, curve in sorted(known, key=lambda one: -one[1].tokens):
        last = curve.trained[-1]
        held_out = curve.held_out[-1].loss if curve.held_out else None
        rows.append(
            [
                name,
                f"{curve.steps:,}",
                millions(last.tokens),
                f"{last.seconds / 60:.0f}",
                f"{last.loss:.3f}",
                MISSING if held_out is None else f"{held_out:.3f}",
            ]
        )
    heads = ["model", "steps", "tokens", "minutes", "training loss", "held-out loss"]
    return table(heads, rows) if rows else MISSING


def operations(members: Sequence[Measured]) -> str:
    """KL of the next token against recomputation, and the cost for the text's own tokens."""
    known = [one for one in shipped(members) if one.divergences]
    if not known:
        return MISSING
    rows = []
    for one in known:
        for each in one.divergences or ():
            name = each.operation if each.times == 1 else f"{each.operation}, {each.times} times"
            if each.divergence is None or each.loss is None:
                rows.append([one.label, name, each.capability, "refused", ""])
                continue
            kl = f"{small(each.divergence.value)} ({small(each.divergence.low)} to "
            kl += f"{small(each.divergence.high)})"
            loss = f"{signed(each.loss.value, 3)} ({interval(each.loss, 3)})"
            rows.append([one.label, name, each.capability, kl, loss])
    return table(["encoding", "operation", "keys", "KL, nats", "loss, nats"], rows)


def served(members: Sequence[Measured]) -> str:
    """The loss reported by a server beside the one computed offline."""
    known = [one for one in shipped(members) if one.served]
    if not known:
        return MISSING
    rows = [
        [
            one.label,
            each.dtype,
            f"{each.texts} of {each.length:,}",
            f"{each.offline:.5f}",
            f"{each.served:.5f}",
            small(abs(each.served - each.offline)),
            small(each.largest),
        ]
        for one in known
        for each in one.served or ()
    ]
    heads = ["server", "texts", "offline", "served", "difference", "largest at a token"]
    return table(["encoding", *heads], rows)
