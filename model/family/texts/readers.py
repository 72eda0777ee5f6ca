"""Extracts raw text from archives, running none of their code: bytes are only read as data.

A member that does not have its declared form raises FamilyError.
"""

import ast
import csv
import fnmatch
import gzip
import io
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.sources import Form

_AR_MAGIC = b"!<arch>\n"


def members(archive: Path, pattern: str) -> dict[str, bytes]:
    """The files that match `pattern` in a .whl, .tar.gz, .tgz or .deb, by name, sorted."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as file:
                names = fnmatch.filter(file.namelist(), pattern)
                found = {name: file.read(name) for name in names}
        elif archive.suffix == ".deb":
            found = _tar_members(io.BytesIO(deb_data(archive.read_bytes())), pattern)
        else:
            with archive.open("rb") as stream:
                found = _tar_members(stream, pattern)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
        raise FamilyError(f"{archive.name} cannot be unpacked ({error}); delete it") from error
    if not found:
        raise FamilyError(f"{archive.name} has no {pattern}; check model/family/texts/sources.toml")
    return dict(sorted(found.items()))


def _tar_members(stream: io.IOBase, pattern: str) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=stream, mode="r:*") as file:
        for member in file:
            content = file.extractfile(member) if member.isfile() else None
            if content is not None and fnmatch.fnmatchcase(member.name, pattern):
                found[member.name] = content.read()
    return found


def deb_data(archive: bytes) -> bytes:
    """The data.tar of a Debian package, which is an ar archive (deb(5)); still compressed."""
    if not archive.startswith(_AR_MAGIC):
        raise FamilyError("The .deb is not an ar archive; delete it and run again")
    at = len(_AR_MAGIC)
    while at + 60 <= len(archive):
        name, size = archive[at : at + 16].decode().strip(), int(archive[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2  # entries begin at even offsets
    raise FamilyError("The .deb has no data.tar; delete it and run again")


def documents(form: Form, found: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """(name, raw text) for each document in the members of one source."""
    if form is Form.R_LAZY:
        index, data = (
            next(content for name, content in found.items() if name.endswith(suffix))
            for suffix in (".rdx", ".rdb")
        )
        yield from r_texts(index, data)
        return
    for name, content in found.items():
        if form is Form.BIBLE:
            yield from bible_books(content.decode())
        elif form is Form.TABLE:
            yield from table_rows(content.decode())
        else:
            text = gzip.decompress(content) if form is Form.GZIP else content
            title = PurePosixPath(name).name.split(".")[0].removesuffix("_gut")
            yield title, text.decode("utf-8-sig")


def in_order(found: Mapping[str, bytes]) -> list[str]:
    """Names by the number in them: chapter_2 before chapter_10."""

    def key(name: str) -> tuple[int, str]:
        digits = re.findall(r"\d+", PurePosixPath(name).name)
        return int(digits[-1]) if digits else 0, name

    return sorted(found, key=key)


def bible_books(module: str) -> Iterator[tuple[str, str]]:
    """(title, text) from a module of pythonbible, which is parsed but never run.

    Its only call has the text, verse → start, verse → end, and book → title. A verse's number is
    book · 1,000,000 + chapter · 1,000 + verse; books are numbered in the order of the titles.
    """
    calls = [node for node in ast.walk(ast.parse(module)) if isinstance(node, ast.Call)]
    if len(calls) != 1 or len(calls[0].args) < 6:
        raise FamilyError("A Bible's module is not one call as expected; check its version")
    text, starts, ends = map(ast.literal_eval, calls[0].args[1:4])
    titles = calls[0].args[5]
    if not isinstance(titles, ast.Dict):
        raise FamilyError("A Bible's module has no titles where expected; check its version")
    chapters: dict[int, list[int]] = {}
    for verse in sorted(starts):
        chapters.setdefault(verse // 1000, []).append(verse)
    for number, value in enumerate(titles.values, start=1):
        parts = [
            text[starts[verses[0]] : ends[verses[-1]]].strip()
            for chapter, verses in chapters.items()
            if chapter // 1000 == number
        ]
        yield ast.literal_eval(value), "\n\n".join(parts)


def table_rows(table: str) -> Iterator[tuple[str, str]]:
    """(Title, Content) of each row of an Orange .tab; two more header lines only give types."""
    rows = csv.reader(io.StringIO(table), delimiter="\t", quotechar='"')
    header = next(rows)
    try:
        title, content = header.index("Title"), header.index("Content")
    except ValueError:
        raise FamilyError("A table has no Title and Content; check its version") from None
    for _ in range(2):
        next(rows)
    for row in rows:
        if len(row) > max(title, content) and row[content].strip():
            yield row[title].strip(), f"{row[title].strip()}\n\n{row[content]}"


def r_texts(index: bytes, data: bytes) -> Iterator[tuple[str, str]]:
    """(variable, its strings as lines) from R's lazy-load database.

    The .rdx is a compressed list whose `variables` are (offset, length) pairs into the .rdb, where
    each is four bytes of length and a zlib stream (R Internals, section 1.8, "Serialization
    Formats"). Only lists, integers and strings are read.
    """
    unpacked = gzip.decompress(index) if index[:2] == b"\x1f\x8b" else zlib.decompress(index)
    top = _R(unpacked).read()
    if not isinstance(top, dict) or not isinstance(top.get("variables"), dict):
        raise FamilyError("An R index has no variables; check the package's version")
    for name, (offset, length) in top["variables"].items():
        lines = _R(zlib.decompress(data[offset + 4 : offset + length])).read()
        if not isinstance(lines, list):
            raise FamilyError(f"{name} holds no strings; check the package's version")
        yield name, "\n".join(map(str, lines))


class _R:
    """R's XDR serialisation, as far as needed for lists and vectors of integers or strings."""

    HEADER = b"X\n"

    def __init__(self, data: bytes) -> None:
        if not data.startswith(self.HEADER):
            raise FamilyError("R data are not in XDR form; check the package's version")
        self._data, self._at = data, len(self.HEADER)
        self._symbols: list[str] = []
        version = self._int()
        self._at += 8  # skips the R versions that wrote it and that can read it
        if version == 3:
            named = self._int()  # bytes in the name of its encoding
            self._at += named

    def read(self) -> object:
        """A dict for a named list, a list for a vector, None for NULL."""
        flags = self._int()
        kind, attributed = flags & 0xFF, bool(flags & 0x200)
        if kind == 254:  # NULL
            return None
        if kind == 255:  # a reference to an earlier symbol
            return self._symbols[(flags >> 8) - 1]
        if kind == 1:  # a symbol
            name = self.read()
            self._symbols.append(str(name))
            return name
        if kind == 9:  # one string
            return self._string()
        if kind == 2:  # a pair list, the form of attributes
            return self._pairs(flags)
        if kind in (10, 13):  # logical, integer
            value: list[object] = [self._int() for _ in range(self._int())]
        elif kind in (16, 19):  # strings, a list
            value = [self.read() for _ in range(self._int())]
        else:
            raise FamilyError(f"R data of type {kind} cannot be read; check the package's version")
        attributes = self.read() if attributed else None
        names = attributes.get("names") if isinstance(attributes, dict) else None
        return dict(zip(names, value, strict=True)) if names else value

    def _pairs(self, flags: int) -> dict[object, object]:
        pairs: dict[object, object] = {}
        while flags & 0xFF == 2:
            if flags & 0x200:
                self.read()
            tag = self.read() if flags & 0x400 else None
            pairs[tag] = self.read()
            flags = self._int()
        return pairs

    def _string(self) -> str:
        length = self._int()
        if length < 0:  # NA
            return ""
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _int(self) -> int:
        (value,) = struct.unpack_from(">i", self._data, self._at)
        self._at += 4
        return int(value)
