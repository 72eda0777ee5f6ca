"""Loss by position: how well a model predicts the token after position t of a long text.

Results are binned by position and never averaged across the trained length. Beyond it, the same
tokens are also predicted from only <s> and the nearest ones, at trained positions: the difference
is the cost of distance itself, whatever the text there is like.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.texts import Texts
from ropewalk.report.statistics import Estimate, Floats, by_document

FIRST = 16  # tokens of the first bin
BEYOND = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # edges, in trained lengths


@dataclass(frozen=True, slots=True)
class LossBin:
    """Nats per token at the positions start .. stop - 1."""

    start: int
    stop: int
    loss: Estimate
    near: Estimate | None  # the same tokens from the nearest only; past the trained length
    change: Estimate | None  # loss - near, token by token


@dataclass(frozen=True, slots=True)
class Losses:
    """One model's losses. `reach`: positions that its encoding has; it refuses more."""

    trained: int
    reach: int
    refusal: str  # why there are no more positions; empty if there are
    windows: int
    documents: tuple[str, ...]
    bins: tuple[LossBin, ...]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One model's nats per token over the later half of trained positions, in all such windows."""

    documents: tuple[str, ...]
    windows: tuple[int, ...]  # [documents]
    means: tuple[float, ...]  # [documents]
    loss: Estimate


def edges(trained: int, context: int) -> list[int]:
    """Edges of the bins: powers of two up to the trained length, then multiples of it."""
    inside = [0] + [FIRST << n for n in range(trained.bit_length()) if FIRST << n < trained]
    beyond = [round(trained * times) for times in BEYOND]
    return [*inside, *(edge for edge in beyond if edge < context), context]


def token_losses(reader: Reader, tokens: Sequence[int]) -> Tensor:
    """[len(tokens) - 1]: for every token but the first."""
    read, following = tokens[:-1], torch.tensor(tokens[1:])
    found = reader.read(read, wanted=len(read)).cpu()
    return -found.gather(1, following[:, None])[:, 0]


def near_losses(reader: Reader, tokens: Sequence[int], trained: int) -> Tensor:
    """[len(tokens) - 1 - trained]: for the tokens past the trained length.

    Each is predicted from the text's first token, <s>, and between trained / 2 and trained - 1
    tokens before it.
    """
    half = trained // 2
    found = []
    for start in range(half, len(tokens) - 1 - half, half):
        part = [tokens[0], *tokens[start + 1 : start + 2 * half + 1]]
        found.append(token_losses(reader, part)[half:])
    return torch.cat(found)[trained - 2 * half :]


def measure(
    reader: Reader,
    texts: Texts,
    *,
    trained: int,
    reach: int,
    refusal: str,
    done: Callable[[float], object],
) -> Losses:
    """`done` is called after each text."""
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
    means = texts.by_document(np.stack(far))
    nearest_means = texts.by_document(np.stack(near)) if near else None
    return Losses(
        trained=trained,
        reach=reach,
        refusal=refusal if reach < context else "",
        windows=len(texts.tokens),
        documents=texts.documents,
        bins=_bins(cuts, means, nearest_means, texts.weights, trained),
    )


def held_out(reader: Reader, texts: Texts, done: Callable[[float], object]) -> HeldOut:
    """texts: windows of the trained length. `done` is called after each."""
    half = (len(texts.tokens[0]) - 1) // 2
    found = []
    for tokens in texts.tokens:
        found.append([float(token_losses(reader, tokens)[half:].double().mean())])
        done(1)
    means = texts.by_document(np.array(found))
    (loss,) = by_document(means, texts.weights)
    windows = tuple(map(int, texts.weights))
    return HeldOut(texts.documents, windows, tuple(means[:, 0].tolist()), loss)


def difference(one: HeldOut, other: HeldOut) -> Estimate | None:
    """By how much the first loss is higher, document by document; None if windows differ."""
    if (one.documents, one.windows) != (other.documents, other.windows):
        return None
    change = np.array(one.means) - np.array(other.means)
    (found,) = by_document(change[:, None], np.array(one.windows, dtype=np.float64))
    return found


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
