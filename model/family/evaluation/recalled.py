"""Recall: whether a model still knows what was stated earlier, by distance and length.

A synthetic text (model/family/texts/recall.py) is put at the end of held-out prose, such that text
and answer end at a given length. The model is right when its most likely token is the answer's at
every position of the answer, as in greedy decoding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, repeat

from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.texts.recall import KINDS, recalls
from ropewalk.model.tokenizers.base import Tokenizer
from ropewalk.report.statistics import Estimate, wilson

SEED = 77  # none of training's seeds


@dataclass(frozen=True, slots=True)
class RecallCell:
    """`distance`: mean number of tokens from the end of the statement to the question."""

    kind: str
    length: int  # tokens, answer included
    wanted: int  # requested distance
    distance: float
    right: int
    trials: int
    share: Estimate


@dataclass(frozen=True, slots=True)
class Recalls:
    """One model's results. Lengths past `reach` are refused and have no cells."""

    trained: int
    reach: int
    cells: tuple[RecallCell, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A synthetic text as tokens, without what follows the answer."""

    kind: str
    wanted: int
    distance: int
    tokens: tuple[int, ...]
    answer: int  # number of tokens of the answer, which come last


def asked(tokenizer: Tokenizer, distances: Sequence[int], trials: int) -> list[Asked]:
    """`trials` texts of each kind and distance; the same for every model with this tokenizer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False)

    found = []
    for wanted in distances:
        made = recalls(SEED + wanted, repeat(wanted, len(KINDS) * trials), lambda s: len(encode(s)))
        for one in made:
            question = tokenizer.encode(one.text[: one.question], bos=True)
            answer = encode(one.answer)
            tokens = (*question, *answer)
            found.append(Asked(one.kind, wanted, one.distance, tokens, len(answer)))
    return found


def measure(
    reader: Reader,
    texts: Sequence[Asked],
    prose: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    trained: int,
    reach: int,
    done: Callable[[float], object],
) -> Recalls:
    """prose: each at least as long as the longest length. `done` is called after each cell."""
    cells = []
    for length in (length for length in lengths if length <= reach):
        fitting = _fitting(texts, length)
        right = _answers(reader, fitting, prose, length)
        for kind in KINDS:
            for wanted in dict.fromkeys(one.wanted for one in fitting):
                of_cell = [
                    (one, answered)
                    for one, answered in zip(fitting, right, strict=True)
                    if (one.kind, one.wanted) == (kind, wanted)
                ]
                cells.append(_cell(of_cell, length))
                done(1)
    return Recalls(trained, reach, tuple(cells))


def cells_in(texts: Sequence[Asked], lengths: Sequence[int], reach: int) -> int:
    """How many cells `measure` will return."""
    distances = [
        {one.wanted for one in _fitting(texts, length)} for length in lengths if length <= reach
    ]
    return len(KINDS) * sum(map(len, distances))


def _fitting(texts: Sequence[Asked], length: int) -> list[Asked]:
    """All texts of those distances at which none is too long."""
    long = {one.wanted for one in texts if len(one.tokens) > length}
    return [one for one in texts if one.wanted not in long]


def _answers(
    reader: Reader, texts: Sequence[Asked], prose: Sequence[Sequence[int]], length: int
) -> list[bool]:
    """Whether each text was answered, in order. Each prose is read once for all its texts.

    A cell's texts are spread over all proses.
    """
    right: dict[int, bool] = {}
    places: dict[tuple[str, int], Iterator[int]] = defaultdict(count)  # index within a cell
    turns = [next(places[one.kind, one.wanted]) % len(prose) for one in texts]
    for turn, before in enumerate(prose):
        mine = [number for number, own in enumerate(turns) if own == turn]
        # Shortest first: each text overwrites only the end of the prose, and longer ones, which
        # start earlier, still find the rest.
        mine.sort(key=lambda number: len(texts[number].tokens))
        for read, number in enumerate(mine):
            own = texts[number]
            start = length - len(own.tokens)
            tokens = [*before[:start], *own.tokens]
            wanted = tokens[-own.answer :]
            known = 0 if read == 0 else start
            found = reader.read(tokens[:-1], wanted=own.answer, start=known)
            right[number] = found.argmax(-1).tolist() == wanted
    return [right[number] for number in range(len(texts))]


def _cell(texts: Sequence[tuple[Asked, bool]], length: int) -> RecallCell:
    """texts: of one kind and distance, and whether each was answered."""
    (one, _), hits = texts[0], sum(answered for _, answered in texts)
    return RecallCell(
        kind=one.kind,
        length=length,
        wanted=one.wanted,
        distance=sum(each.distance for each, _ in texts) / len(texts),
        right=hits,
        trials=len(texts),
        share=wilson(hits, len(texts)),
    )
