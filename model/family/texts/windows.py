"""The order in which training sees tokens: windows cut from the documents, shuffled by a seed."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.corpus import Split


class Windows:
    """Endless epochs over a split, deterministic in split, length and seed.

    In each epoch the documents are joined in a new order and cut into windows, which are then
    shuffled. A document that fits into a window but would be cut begins a window instead: texts
    that test recall must not lose their beginning, where windows are read whole.
    """

    def __init__(self, split: Split, length: int, seed: int) -> None:
        """Raises FamilyError when the split has no whole window."""
        self._split = split
        self.length = length
        self._seed = seed
        # Two, because a step may end one epoch and begin the next.
        self._epoch = lru_cache(maxsize=2)(self._cut)
        self._sizes: list[int] = []  # numbers of windows of the epochs cut so far
        if not len(self._epoch(0)[1]):
            raise FamilyError(
                f"the training texts have {len(split.tokens)} tokens, fewer than one window of "
                f"{length}; run ropewalk family prepare"
            )

    def step(self, number: int, count: int) -> npt.NDArray[np.int64]:
        """[count, length + 1]: the windows of step `number`, from 0, each with its next token."""
        first, epoch = number * count, 0
        while first >= self._size(epoch):
            first, epoch = first - self._size(epoch), epoch + 1
        found: list[npt.NDArray[np.uint16]] = []
        while len(found) < count:
            tokens, starts = self._epoch(epoch)
            here = starts[first : first + count - len(found)]
            found += [tokens[start : start + self.length + 1] for start in here]
            first, epoch = 0, epoch + 1
        return np.stack(found).astype(np.int64)

    def _size(self, epoch: int) -> int:
        """Number of windows of an epoch; must be called for epochs in order."""
        if epoch == len(self._sizes):
            self._sizes.append(len(self._epoch(epoch)[1]))
        return self._sizes[epoch]

    def _cut(self, epoch: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
        drawn = np.random.default_rng([self._seed, epoch])
        order = drawn.permutation(len(self._split.starts))
        documents = [self._split.document(number) for number in order]
        ends = np.cumsum([len(document) for document in documents])
        starts = np.array(_cuts(ends.tolist(), self.length), dtype=np.int64)
        return np.concatenate(documents), drawn.permutation(starts)


def _cuts(ends: list[int], length: int) -> list[int]:
    """The starts of windows of length + 1, given the ends of the documents."""
    cuts: list[int] = []
    start, document = 0, 0
    while start + length < ends[-1]:
        cuts.append(start)
        last = start + length  # the window's last token, which is only predicted
        while ends[document] <= last:
            document += 1
        begins = ends[document - 1] if document else 0
        fits = ends[document] - begins <= length + 1
        start = begins if fits and begins > start and ends[document] > last + 1 else last
    return cuts
