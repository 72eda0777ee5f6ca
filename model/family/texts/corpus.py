"""Documents, and the corpus file that training reads: token ids and where documents start."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.files import replacing
from ropewalk.model.family.texts import readers
from ropewalk.model.family.texts.cleaning import clean
from ropewalk.model.family.texts.sources import Source, held_out


@dataclass(frozen=True, slots=True)
class Document:
    """One novel, address, book, tale or play, cleaned."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return held_out(self.source, self.name)


def documents(source: Source, archive: Path) -> Iterator[Document]:
    """Documents of one source, except those without text. Raises FamilyError."""
    found = readers.members(archive, source.members)
    ordered = {name: found[name] for name in readers.in_order(found)}
    raw = list(readers.documents(source.form, ordered))
    if source.whole:
        raw = [(source.name, "\n\n".join(text for _, text in raw))]
    for name, text in raw:
        cleaned = clean(text, source.layout, source.start)
        if cleaned and name not in source.omit:
            yield Document(source.name, name, cleaned)


@dataclass(frozen=True, slots=True)
class Split:
    """Documents as one sequence of tokens; each begins with the tokenizer's <s>."""

    tokens: npt.NDArray[np.uint16]  # [tokens]
    starts: npt.NDArray[np.int64]  # [documents], ascending, the first 0
    names: tuple[str, ...]  # [documents], as source/document

    @classmethod
    def of(cls, pieces: Sequence[tuple[str, Sequence[int]]]) -> "Split":
        """From (name, tokens) of each document. Ids must be less than 65,536."""
        lengths = [len(tokens) for _, tokens in pieces]
        joined = [np.asarray(tokens, dtype=np.uint16) for _, tokens in pieces]
        return cls(
            np.concatenate(joined) if joined else np.zeros(0, np.uint16),
            np.cumsum([0, *lengths[:-1]], dtype=np.int64)[: len(lengths)],
            tuple(name for name, _ in pieces),
        )

    @property
    def bos(self) -> int:
        """The id of <s>. Raises IndexError when there is no document."""
        return int(self.tokens[0])

    def document(self, number: int) -> npt.NDArray[np.uint16]:
        """A view of one document's tokens."""
        last = number + 1 == len(self.starts)
        end = len(self.tokens) if last else self.starts[number + 1]
        return self.tokens[self.starts[number] : end]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What training may see, and what it must not."""

    train: Split
    held_out: Split
    fingerprint: str  # of the texts, the tokenizer and the code's version
    tokenizer: bytes  # the SentencePiece model that produced the tokens


def save(corpus: Corpus, path: Path) -> None:
    """One compressed file, written in full or not at all."""
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "fingerprint": np.array(corpus.fingerprint),
        "tokenizer": np.frombuffer(corpus.tokenizer, dtype=np.uint8),
    }
    for name, split in (("train", corpus.train), ("held_out", corpus.held_out)):
        arrays[f"{name}_tokens"] = split.tokens
        arrays[f"{name}_starts"] = split.starts
        arrays[f"{name}_names"] = np.array(split.names, dtype=np.str_)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> Corpus:
    """Raises FamilyError when it is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            train, kept = (
                Split(
                    stored[f"{name}_tokens"],
                    stored[f"{name}_starts"],
                    tuple(map(str, stored[f"{name}_names"])),
                )
                for name in ("train", "held_out")
            )
            return Corpus(train, kept, str(stored["fingerprint"]), stored["tokenizer"].tobytes())
    except FileNotFoundError as error:
        raise FamilyError(f"{path} is missing; run ropewalk family prepare") from error
    except Exception as error:  # numpy passes on any error of its parsers for a damaged file
        raise FamilyError(
            f"{path} is damaged ({error}); delete it and run ropewalk family prepare"
        ) from error
