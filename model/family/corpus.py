"""Documents, and the corpus file that training reads: token ids with the starts of documents."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from model.family import readers
from model.family.cleaning import clean
from model.family.errors import FamilyError
from model.family.sources import Source, held_out


@dataclass(frozen=True, slots=True)
class Document:
    """One novel, address, book, tale or play: cleaned."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return held_out(self.source, self.name)


def documents(source: Source, archive: Path) -> Iterator[Document]:
    """Those of one source, without the ones that have no text. Raises FamilyError."""
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
    """Documents as one row of tokens; each begins with the tokenizer's <s>."""

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

    def document(self, number: int) -> npt.NDArray[np.uint16]:
        """The tokens of one document: a view."""
        ends = [*self.starts[1:], len(self.tokens)]
        return self.tokens[self.starts[number] : ends[number]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """What training may see, and what it may not."""

    train: Split
    held_out: Split
    fingerprint: str  # of the texts, the tokenizer and the code's version


def save(corpus: Corpus, path: Path) -> None:
    """One compressed file, there in full or not at all."""
    arrays: dict[str, npt.NDArray[np.generic]] = {"fingerprint": np.array(corpus.fingerprint)}
    for name, split in (("train", corpus.train), ("held_out", corpus.held_out)):
        arrays[f"{name}_tokens"] = split.tokens
        arrays[f"{name}_starts"] = split.starts
        arrays[f"{name}_names"] = np.array(split.names, dtype=np.str_)
    partial = path.with_name(f".{path.name}.partial.npz")
    np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


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
            return Corpus(train, kept, str(stored["fingerprint"]))
    except FileNotFoundError as error:
        raise FamilyError(f"{path} is missing; run ropewalk family prepare") from error
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise FamilyError(
            f"{path} is damaged ({error}); delete it and run ropewalk family prepare"
        ) from error
