"""Loss by position: how well a model predicts the token after position t of a long text.

Positions are told apart in bins and never averaged over the trained length and beyond. The same
tokens are also predicted from the nearest ones alone, at positions that were trained: what the
distance itself costs is the difference, whatever the text is like there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from model.family.evaluation.estimates import Estimate, Floats, by_document
from model.family.evaluation.reading import Reads
from model.family.evaluation.texts import Texts

FIRST = 16  # tokens of the first bin
BEYOND = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # edges, in trained lengths


@dataclass(frozen=True, slots=True)
class LossBin:
    """Nats per token at the positions start .. stop - 1."""

    start: int
    stop: int
    loss: Estimate
    near: Estimate | None  # of the same tokens from the nearest alone; beyond the trained length
    change: Estimate | None  # loss - near, token by token


@dataclass(frozen=True, slots=True)
class Losses:
    """One model's. `reach`: positions that its encoding has; past them it refuses."""

    trained: int
    reach: int
    refusal: str  # why there are no more positions; empty when there are
    windows: int
    documents: tuple[str, ...]
    weights: tuple[float, ...]  # [documents], windows
    bins: tuple[LossBin, ...]
    by_document: tuple[tuple[float, ...], ...]  # [documents, bins], for paired comparisons


def edges(trained: int, context: int) -> list[int]:
    """Of the bins: powers of two up to the trained length, then in steps of it."""
    inside = [0] + [FIRST << n for n in range(trained.bit_length()) if FIRST << n < trained]
    beyond = [round(trained * times) for times in BEYOND]
    return [*inside, *(edge for edge in beyond if edge < context), context]


def token_losses(reader: Reads, tokens: Sequence[int]) -> Tensor:
    """[len(tokens) - 1], of every token but the first."""
    read, following = tokens[:-1], torch.tensor(tokens[1:])
    found = reader.read(read, wanted=len(read)).cpu()
    return -found.gather(1, following[:, None])[:, 0]


def near_losses(reader: Reads, tokens: Sequence[int], trained: int) -> Tensor:
    """[len(tokens) - 1 - trained], of the tokens past the trained length.

    Each is predicted from at least trained / 2 and at most `trained` tokens before it.
    """
    half = trained // 2
    found = []
    for start in range(half, len(tokens) - 1 - half, half):
        part = tokens[start : start + 2 * half + 1]
        found.append(token_losses(reader, part)[half:])
    return torch.cat(found)[trained - 2 * half :]


def measure(
    reader: Reads,
    texts: Texts,
    *,
    trained: int,
    reach: int,
    refusal: str,
    done: Callable[[float], object],
) -> Losses:
    """`done` hears of each text."""
    context = len(texts.tokens[0]) - 1
    cuts = [edge for edge in edges(trained, context) if edge <= reach]
    far, near = [], []
    for tokens in texts.tokens:
        own = token_losses(reader, tokens[: reach + 1])
        far.append(_means(own, cuts))
        if reach > trained:
            nearest = torch.full((context,), torch.nan)
            nearest[trained:] = near_losses(reader, tokens, trained)
            near.append(_means(nearest, edges(trained, context)))
        done(1)
    weights = texts.weights
    means = texts.by_document(np.stack(far))
    bins = _bins(cuts, means, texts.by_document(np.stack(near)) if near else None, weights, trained)
    return Losses(
        trained=trained,
        reach=reach,
        refusal=refusal if reach < context else "",
        windows=len(texts.tokens),
        documents=texts.documents,
        weights=tuple(weights.tolist()),
        bins=bins,
        by_document=tuple(tuple(row) for row in means.tolist()),
    )


def _means(losses: Tensor, cuts: Sequence[int]) -> Floats:
    found: Floats = np.array([float(losses[a:b].double().mean()) for a, b in pairwise(cuts)])
    return found


def _bins(
    cuts: Sequence[int], means: Floats, near: Floats | None, weights: Floats, trained: int
) -> tuple[LossBin, ...]:
    own = by_document(means, weights)
    bins = []
    for number, loss in enumerate(own):
        start, stop = cuts[number], cuts[number + 1]
        nearest = change = None
        if near is not None and start >= trained:
            column = near[:, number : number + 1]
            (nearest,) = by_document(column, weights)
            (change,) = by_document(means[:, number : number + 1] - column, weights)
        bins.append(LossBin(start, stop, loss, nearest, change))
    return tuple(bins)
