"""From packages to the corpus file, on small made-up archives: no network."""

import gzip
import hashlib
import io
import random
import struct
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts import corpus, prepare, readers, recall, tokenizer
from ropewalk.model.family.texts.cleaning import clean, strip_gutenberg
from ropewalk.model.family.texts.fetch import fetch
from ropewalk.model.family.texts.sources import (
    HELD_OUT,
    SOURCES,
    Form,
    Layout,
    Registry,
    Source,
    held_out,
)
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer

WORDS = ["whale", "ship", "sea", "captain", "harbour", "storm", "letter", "night", "and", "the"]


def story(seed: int) -> str:
    drawn = random.Random(seed)
    return "\n".join(" ".join(drawn.choices(WORDS, k=12)) + "." for _ in range(80))


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    entries = {"debian-binary": b"2.0", "data.tar.xz": tar(files, "w:xz")}  # odd: padded
    out = b"!<arch>\n"
    for name, content in entries.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


def wheel(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def source(file: str, content: bytes, **fields) -> Source:
    usual = {
        "name": "tales",
        "registry": Registry.PIP,
        "package": "tales",
        "version": "1",
        "file": file,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "members": "*.txt",
        "form": Form.TEXT,
        "layout": Layout.LINES,
        "licence": "public domain",
    }
    return Source(**{**usual, **fields})


class Shelf:
    """A registry in memory that counts."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.calls = files, 0

    def __call__(self, wanted: Source, folder: Path) -> None:
        self.calls += 1
        (folder / wanted.file).write_bytes(self.files[wanted.file])


@contextmanager
def no_bars(title: str, total: int, unit: str):
    class Bar:
        def update(self, n: float) -> None:
            pass

    yield Bar()


# Archives


FILES = {"a/one.txt": b"first", "a/two.txt": b"second", "a/code.py": b"raise SystemExit"}


@pytest.mark.parametrize(
    ("name", "content"), [("x.whl", wheel(FILES)), ("x.tgz", tar(FILES)), ("x.deb", deb(FILES))]
)
def test_members_are_read_from_every_kind_of_archive(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content)
    found = readers.members(tmp_path / name, "*/*.txt")
    assert found == {"a/one.txt": b"first", "a/two.txt": b"second"}


@pytest.mark.parametrize("name", ["x.whl", "x.tgz", "x.deb"])
def test_what_is_no_archive_is_refused(tmp_path, name) -> None:
    (tmp_path / name).write_bytes(b"not an archive")
    with pytest.raises(FamilyError, match="delete it"):
        readers.members(tmp_path / name, "*.txt")


def test_an_archive_without_the_members_is_refused(tmp_path) -> None:
    (tmp_path / "x.whl").write_bytes(wheel(FILES))
    with pytest.raises(FamilyError, match=r"has no \*\.md"):
        readers.members(tmp_path / "x.whl", "*.md")


# Forms


def test_a_bible_is_parsed_into_books_and_never_run() -> None:
    module = '''raise SystemExit  # not reached
bible = Bible(
    Version.ANY,
    """One. Two. Three. Four. """,
    {1001001: 0, 1001002: 5, 1002001: 10, 2001001: 17},
    {1001001: 5, 1001002: 10, 1002001: 17, 2001001: 23},
    {},
    {Book.A: "Genesis", Book.B: "Exodus"},
)
'''
    assert list(readers.bible_books(module)) == [
        ("Genesis", "One. Two.\n\nThree."),
        ("Exodus", "Four."),
    ]
    with pytest.raises(FamilyError, match="one call"):
        list(readers.bible_books("open('x')"))


def test_of_a_table_only_title_and_content_are_read() -> None:
    table = 'Kind\tTitle\tContent\nd\tstring\tstring\nclass\t\t\nMagic\tA Frog\t"He said ""no""."\n'
    assert list(readers.table_rows(table)) == [("A Frog", 'A Frog\n\nHe said "no".')]
    with pytest.raises(FamilyError, match="Title and Content"):
        list(readers.table_rows("Kind\tBody\n"))


def r_string(text: str | None) -> bytes:
    content = (text or "").encode()
    return struct.pack(">ii", 9, -1 if text is None else len(content)) + content


def r_strings(texts, flags: int = 16) -> bytes:
    return struct.pack(">ii", flags, len(texts)) + b"".join(map(r_string, texts))


def r_named(items: dict[str, bytes], symbol: bytes) -> bytes:
    """A list with attribute `names`; `symbol` is how the name of the attribute is written."""
    head = struct.pack(">ii", 19 | 0x200, len(items))
    attributes = struct.pack(">i", 0x402) + symbol + r_strings(list(items))
    return head + b"".join(items.values()) + attributes + struct.pack(">i", 254)


R_HEAD = b"X\n" + struct.pack(">iiii", 3, 1, 2, 5) + b"UTF-8"


def test_strings_are_read_from_an_r_database() -> None:
    chunks = []
    for lines in (["Emma", "", "handsome – rich"], ["Mansfield", None]):
        unpacked = R_HEAD + r_strings(lines)
        chunks.append(struct.pack(">i", len(unpacked)) + zlib.compress(unpacked))
    first, second = map(len, chunks)
    places = {
        "emma": struct.pack(">iiii", 13, 2, 0, first),
        "park": struct.pack(">iiii", 13, 2, first, second),
    }
    said_before = struct.pack(">i", 255 | 1 << 8)
    variables = r_named(places, struct.pack(">i", 1) + r_string("names"))
    index = R_HEAD + r_named({"variables": variables}, said_before)
    found = dict(readers.r_texts(gzip.compress(index), b"".join(chunks)))
    assert found == {"emma": "Emma\n\nhandsome – rich", "park": "Mansfield\n"}


def test_r_data_of_another_type_are_refused() -> None:
    with pytest.raises(FamilyError, match="type 14"):
        list(readers.r_texts(gzip.compress(R_HEAD + struct.pack(">i", 14)), b""))
    with pytest.raises(FamilyError, match="XDR"):
        list(readers.r_texts(gzip.compress(b"A\n"), b""))


def test_chapters_are_in_the_order_of_their_numbers() -> None:
    names = {"chapter_10.txt": b"", "chapter_9.txt": b"", "chapter_100.txt": b""}
    assert readers.in_order(names) == ["chapter_9.txt", "chapter_10.txt", "chapter_100.txt"]


# Cleaning


@pytest.mark.parametrize(
    "ending",
    [
        "End of Project Gutenberg's X",
        "End of the Project Gutenberg EBook of X",
        "*** END OF THIS PROJECT GUTENBERG EBOOK X ***",
        "***END OF THE PROJECT GUTENBERG EBOOK X***",
    ],
)
def test_what_gutenberg_says_of_itself_is_dropped(ending) -> None:
    text = f"Licence\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\nThe text.\n{ending}\nMore"
    assert strip_gutenberg(text) == "\nThe text.\n"
    assert strip_gutenberg("No markers.\nAt all.") == "No markers.\nAt all."


def test_spaces_and_quotes_are_those_of_a_keyboard() -> None:
    raw = "\ufeff  “It’s” \t late—go  \r\n\r\n\r\n\r\nNext\r\nline"
    assert clean(raw, Layout.LINES) == '"It\'s" late--go\n\nNext\nline\n'
    assert clean(raw, Layout.PROSE) == '"It\'s" late--go\n\nNext line\n'
    assert clean("packager\nSTART here", Layout.LINES, "START") == "START here\n"
    assert clean(" \n ", Layout.LINES) == ""


# Holding out


def test_the_same_books_of_every_bible_are_held_out() -> None:
    assert HELD_OUT["bible-web"] == HELD_OUT["bible-bbe"]
    assert held_out("bible-web", "Ruth") and not held_out("bible-web", "Genesis")


def test_addresses_are_held_out_by_their_year() -> None:
    assert held_out("union", "1838_martin_van_buren_d")
    assert not held_out("union", "1839_martin_van_buren_d")
    assert not held_out("austen", "northangerabbey2")


def test_every_held_out_source_exists_and_digests_are_whole() -> None:
    assert set(HELD_OUT) <= {one.name for one in SOURCES}
    assert len({one.name for one in SOURCES}) == len(SOURCES)
    assert all(len(bytes.fromhex(one.sha256)) == 32 for one in SOURCES)


# Fetching


def test_an_archive_with_another_digest_is_not_kept(tmp_path) -> None:
    wanted = source("x.whl", b"right")
    with pytest.raises(FamilyError, match="and was not kept"):
        fetch([wanted], tmp_path, Shelf({"x.whl": b"wrong"}), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_fetched_once_and_again_when_damaged(tmp_path) -> None:
    wanted, shelf = source("x.whl", b"right"), Shelf({"x.whl": b"right"})
    told = []
    both = [wanted, replace(wanted, name="other")]
    fetch(both, tmp_path, shelf, told.append)
    fetch(both, tmp_path, shelf, told.append)
    assert (shelf.calls, told) == (1, [5, 5])
    (tmp_path / "x.whl").write_bytes(b"cut")
    fetch(both, tmp_path, shelf, told.append)
    assert shelf.calls == 2 and (tmp_path / "x.whl").read_bytes() == b"right"


def test_another_file_than_expected_is_named(tmp_path) -> None:
    wanted = source("x.whl", b"right")

    def download(_: Source, folder: Path) -> None:
        (folder / "y.whl").write_bytes(b"right")

    with pytest.raises(FamilyError, match=r"delivered y\.whl instead of x\.whl"):
        fetch([wanted], tmp_path, download, lambda _: None)


# Recall


def test_a_recall_text_says_its_answer_before_and_at_the_end() -> None:
    made = list(recall.recalls(1, iter([100, 200, 12, 4] * 10), lambda text: len(text.split())))
    assert [one.kind for one in made] == ["pairs", "copy"] * 20
    for one, wanted in zip(made, [100, 200, 12, 4] * 10, strict=True):
        assert one.text[one.question :] == f"{one.answer}.\n"
        assert wanted <= one.distance < wanted + 20
        if one.kind == "copy":
            said = one.text.index(f"{one.answer}.")
            between = one.text[said + len(one.answer) + 1 : one.question]
        else:
            asked = one.text[: one.question].rsplit("Where does ", 1)[1]
            name, thing = asked.split("?")[0].split(" keep the ")
            fact = f"{name} keeps the {thing} in the{one.answer}."
            between = one.text[one.text.index(fact) + len(fact) : one.question]
        assert len(between.split()) == one.distance


def test_recall_texts_are_the_same_for_a_seed() -> None:
    def texts(seed: int) -> list[str]:
        return [one.text for one in recall.recalls(seed, iter([50] * 6), len)]

    assert texts(3) == texts(3) != texts(4)
    assert len(set(texts(3))) == 6


# The tokenizer and the whole


def test_the_tokenizer_gives_every_text_back() -> None:
    texts = [story(seed) for seed in range(4)]
    model = tokenizer.train(texts, pieces=296)
    assert model == tokenizer.train(texts, pieces=296)
    spm = SpmTokenizer(SpmModel(model))
    for text in (texts[0], "  two  spaces\n\n\tÆther 鯨 ﬁ 1234 \n", "The", " The"):
        tokens = spm.encode(text, bos=False)
        assert b"".join(spm.token_bytes(t, first=False) for t in tokens) == text.encode()


@pytest.fixture
def small(monkeypatch) -> tuple[list[Source], Shelf]:
    """Two sources, one of which has a play that is held out."""
    monkeypatch.setitem(HELD_OUT, "shakespeare", ("macbeth",))
    plays = tar(
        {f"p/{name}_gut.txt": story(n).encode() for n, name in enumerate(("lear", "macbeth"))}
    )
    parts = tar({f"p/chapter_{n}.txt": story(n + 5).encode() for n in (10, 9)})
    sources = [
        source("plays.tgz", plays, name="shakespeare"),
        source("novel.tgz", parts, name="novel", whole=True),
    ]
    return sources, Shelf({"plays.tgz": plays, "novel.tgz": parts})


def run(folder: Path, small) -> prepare.Prepared:
    folder.mkdir(exist_ok=True)
    sources, shelf = small
    return prepare.prepare(folder, shelf, no_bars, sources=sources, pieces=360)


def test_preparing_splits_by_whole_documents(tmp_path, small) -> None:
    done = run(tmp_path, small)
    made = done.corpus
    assert made.held_out.names == ("shakespeare/macbeth",)
    natural = [name for name in made.train.names if not name.startswith("recall/")]
    assert sorted(natural) == ["novel/novel", "shakespeare/lear"]
    spm = SpmTokenizer(SpmModel((tmp_path / "tokenizer.model").read_bytes()))
    tokens = made.train.document(made.train.names.index("novel/novel"))
    assert tokens.dtype == np.uint16
    text = b"".join(spm.token_bytes(int(t), first=False) for t in tokens[1:]).decode()
    assert text == f"{story(14)}\n\n{story(15)}\n"
    assert tokens[0] == spm.encode("", bos=True)[0]
    made_up = sum(
        len(made.train.document(n))
        for n, name in enumerate(made.train.names)
        if name.startswith("recall/")
    )
    assert made_up >= 0.05 * len(made.train.tokens)
    assert "| shakespeare | pip tales 1 | 2 |" in done.card
    assert (tmp_path / "data_card.md").read_text() == done.card


def test_a_held_out_name_that_no_document_has_is_said(tmp_path, small, monkeypatch) -> None:
    monkeypatch.setitem(HELD_OUT, "shakespeare", ("macbeth", "mac"))
    with pytest.raises(FamilyError, match="shakespeare has no document 'mac' to hold out"):
        run(tmp_path, small)


def test_what_is_finished_is_not_done_again(tmp_path, small, monkeypatch) -> None:
    first = run(tmp_path, small)

    def refused(*_, **__):
        raise AssertionError("done again")

    monkeypatch.setattr(prepare.corpus, "documents", refused)
    monkeypatch.setattr(prepare.tokenizer, "train", refused)
    monkeypatch.setattr(prepare.recall, "recalls", refused)
    second = run(tmp_path, small)
    assert small[1].calls == 2
    assert second.card == first.card
    np.testing.assert_array_equal(second.corpus.train.tokens, first.corpus.train.tokens)


@pytest.mark.parametrize("name", ["texts.json.gz", "corpus.npz", "tokenizer.model"])
def test_a_part_that_was_cut_off_is_made_again_the_same(tmp_path, small, name) -> None:
    first = run(tmp_path, small)
    if name == "tokenizer.model":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:100])
    second = run(tmp_path, small)
    assert second.corpus.fingerprint == first.corpus.fingerprint
    np.testing.assert_array_equal(second.corpus.train.tokens, first.corpus.train.tokens)


def test_a_corpus_that_is_missing_or_damaged_says_what_to_run(tmp_path) -> None:
    with pytest.raises(FamilyError, match="is missing; run ropewalk family prepare"):
        corpus.load(tmp_path / "corpus.npz")
    (tmp_path / "corpus.npz").write_bytes(b"PK")
    with pytest.raises(FamilyError, match="is damaged"):
        corpus.load(tmp_path / "corpus.npz")


def test_a_corpus_with_a_flipped_byte_is_damaged(tmp_path, small) -> None:
    path = run(tmp_path, small).path
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            found = corpus.load(path)
        except FamilyError as error:
            assert "is damaged" in str(error)
        else:  # in a part of the archive that says nothing of the content
            assert found.held_out.names == ("shakespeare/macbeth",)


def test_the_shipped_tokenizer_gives_text_back_and_fits_the_corpus() -> None:
    spm = SpmTokenizer(SpmModel(prepare.SHIPPED_TOKENIZER.read_bytes()))
    assert spm.vocab_size == tokenizer.PIECES
    text = "It is a truth universally acknowledged,\n\n  that 1813 -- Ünïcode 鯨.\n"
    tokens = spm.encode(text, bos=False)
    assert b"".join(spm.token_bytes(t, first=False) for t in tokens) == text.encode()
    assert len(tokens) < 45  # trained on English: bytes alone would be 75


def test_a_given_tokenizer_is_used_and_none_is_trained(tmp_path, small, monkeypatch) -> None:
    sources, shelf = small
    monkeypatch.setattr(prepare.tokenizer, "train", None)
    given = prepare.SHIPPED_TOKENIZER
    done = prepare.prepare(tmp_path, shelf, no_bars, sources=sources, given_tokenizer=given)
    assert not (tmp_path / "tokenizer.model").exists()
    spm = SpmTokenizer(SpmModel(given.read_bytes()))
    assert spm.encode(story(1) + "\n", bos=True) == done.corpus.held_out.tokens.tolist()
