"""What a model wrote reaches the terminal whole, does not control it, and is broken at words."""

import io

import pytest
import wcwidth

from ropewalk.server.cli.printing import Printed, printable


def test_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\r\x9b\u202ec\n\té語") == "a[2Jbc\n\té語"
    assert printable("".join(map(chr, range(32)))) == "\t\n"
    assert printable("".join(map(chr, range(0x7F, 0xA0)))) == ""
    assert printable("\ud83d half of an emoji") == " half of an emoji"


FAMILY = "👨\u200d👩\u200d👧"
LANGUAGES = {
    "French": "Il a dit\u202f: «\u00a0Ça va\u202f?\u00a0» 3\u2009000\u00a0€",
    "Japanese": "東京\u3000日本、「はい」。が",
    "Persian": "می\u200cخواهم کتاب\u200cها را بخوانم\u061c \u200f(۱)\u200e",
    "Hindi": "क्\u200dष हिन्दी",
    "emoji": f"{FAMILY} 👍🏽 ❤\ufe0f 🏴\U000e0067\U000e0062\U000e007f 1\ufe0f\u20e3 🇫🇷",
    "Hebrew": "שלום \u2067abc\u2069 עולם",
    "hyphens": "co\u00adoperate non\u2011breaking zero\u200bwidth word\u2060joiner",
    "rare": "\ue000 \U0010fffd \u0378 \u2028",  # private, unassigned: newer than Unicode's tables
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_no_control_character_is_printed(language: str) -> None:
    text = LANGUAGES[language]
    assert printable(text) == text
    out = io.StringIO()
    printed = Printed(out)
    for letter in text:  # as if each came in a chunk of its own
        printed.add(letter)
    printed.end()
    assert out.getvalue() == text + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(text: str, columns: int, monkeypatch: pytest.MonkeyPatch, size: int = 1) -> list[str]:
    """The lines on a terminal for a text that comes in pieces of `size` characters."""
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    printed = Printed(out)
    for start in range(0, len(text), size):
        printed.add(text[start : start + size])
    printed.end()
    assert out.getvalue().endswith("\n")
    return out.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("the quick brown fox", ["the quick ", "brown fox"]),
        ("aaaaaaaaaa bbb", ["aaaaaaaaaa", "bbb"]),
        ("aaaaa bbbb cc", ["aaaaa bbbb", "cc"]),
        ("two\n\n  lines\n", ["two", "", "  lines"]),
        ("été «\u00a0mot\u00a0» là", ["été ", "«\u00a0mot\u00a0» là"]),
        ("日本語の長い文です。", ["日本語の長", "い文です。"]),
        ("日本語の「長い」文です", ["日本語の", "「長い」文", "です"]),
        ("ab 日本語の。長い", ["ab 日本語", "の。長い"]),
        (f"hi {FAMILY}{FAMILY}{FAMILY}👍🏽", [f"hi {FAMILY}{FAMILY}{FAMILY}", "👍🏽"]),
        ("e\u0301" * 9 + " e\u0301e\u0301", ["e\u0301" * 9 + " ", "e\u0301e\u0301"]),
        ("a    b", ["a    b"]),
        ("aaaaaaaa    b", ["aaaaaaaa", "b"]),
    ],
)  # fmt: skip
def test_lines_end_between_words(text, broken, size, monkeypatch) -> None:
    got = lines(text, 10, monkeypatch, size)
    assert got == broken
    assert all(wcwidth.width(line) <= 10 for line in got)


def test_words_longer_than_a_line_are_left_to_the_terminal(monkeypatch) -> None:
    url = "https://example.org/a/long/path"
    assert lines(f"see {url} for it", 10, monkeypatch, 100) == ["see ", url + " for it"]
    assert "".join(lines("ก" * 99, 10, monkeypatch)) == "ก" * 99


def test_a_word_longer_than_a_line_is_not_held_back(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    out = Terminal()
    printed = Printed(out)
    for _ in range(25):
        printed.add("x")
    assert len(out.getvalue().replace("\n", "")) > 15
    assert out.getvalue().count("\n") == 0 or max(map(len, out.getvalue().split("\n"))) <= 11


def test_elsewhere_lines_are_not_broken_and_pieces_come_at_once() -> None:
    out = io.StringIO()
    printed = Printed(out)
    printed.add("word " * 99 + "half a wo")
    assert out.getvalue() == "word " * 99 + "half a wo"
    printed.add("rd\n")
    printed.end()
    assert out.getvalue() == "word " * 99 + "half a word\n"


def test_nothing_at_all_is_no_line() -> None:
    for out in (io.StringIO(), Terminal()):
        printed = Printed(out)
        printed.add("\x1b")
        printed.end()
        assert out.getvalue() == ""
