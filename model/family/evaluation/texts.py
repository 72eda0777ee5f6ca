"""Selects held-out texts: whole windows of equal length, few from any one document."""

import re
from dataclasses import dataclass

import numpy as np

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.corpus import Split
from ropewalk.report.statistics import Floats

_TRANSLATION = re.compile(r"^bible-\w+/")


@dataclass(frozen=True, slots=True)
class Texts:
    """The same for every model, so that models are compared on the same tokens.

    Translations of a book count as one document: for an interval they are not independent.
    """

    documents: tuple[str, ...]
    owner: tuple[int, ...]  # [windows], index into documents
    tokens: tuple[tuple[int, ...], ...]  # [windows, length + 1]: the last one is only predicted

    @property
    def weights(self) -> Floats:
        """[documents]: how many windows each has."""
        return np.bincount(self.owner, minlength=len(self.documents)).astype(np.float64)

    def by_document(self, values: Floats) -> Floats:
        """[windows, columns] → the mean of each document's windows, [documents, columns]."""
        owner = np.asarray(self.owner)
        rows = [values[owner == number].mean(axis=0) for number in range(len(self.documents))]
        return np.stack(rows)


def texts_of(split: Split, length: int, count: int) -> Texts:
    """At most `count` windows, in sequence from each document's start, alternating documents.

    <s> replaces the first token of each, as the server prepends it to a prompt. Raises
    FamilyError when fewer than two documents are that long.
    """
    names = [_TRANSLATION.sub("bible/", name) for name in split.names]
    sizes = [len(split.document(number)) // (length + 1) for number in range(len(split.names))]
    turns = [
        (place, number)
        for place in range(max(sizes, default=0))
        for number, size in enumerate(sizes)
        if place < size
    ][:count]
    used = list(dict.fromkeys(names[number] for number in sorted({n for _, n in turns})))
    if len(used) < 2:
        raise FamilyError(
            f"only {len(used)} held-out documents have {length + 1:,} tokens, but an interval "
            "needs two; hold out longer ones"
        )
    return Texts(
        tuple(used),
        tuple(used.index(names[number]) for _, number in turns),
        tuple(
            (split.bos, *split.document(number)[place * (length + 1) :][1 : length + 1].tolist())
            for place, number in turns
        ),
    )
