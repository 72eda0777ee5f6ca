"""A model's text on the terminal while it streams: nothing that controls it, broken at words."""

import shutil
import unicodedata
from collections.abc import Iterator
from typing import TextIO

# What ends a word and may be left out at a line's end: not the non-breaking spaces.
_SPACES = " \t\u3000"
_CONTROLS = frozenset({"Cc", "Cs"})  # half a surrogate pair is no character
_OVERRIDES = "\u202d\u202e"  # they show letters in another order than they are in


def printable(text: str) -> str:
    """Without control characters: a model's output must not control the terminal."""
    return "".join(
        letter
        for letter in text
        if letter in "\n\t"
        or (unicodedata.category(letter) not in _CONTROLS and letter not in _OVERRIDES)
    )


class Printed:
    """Prints one text piece by piece; where `out` is a terminal, lines end between words.

    There a word is held back until it is complete, since only then is its place known.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._wraps = out.isatty()
        self._held = ""
        self._faint = False
        self._last = "\n"
        self._column = 0

    def add(self, piece: str, *, faint: bool = False) -> None:
        """faint: a model's thoughts, which only a terminal shows."""
        if faint and not self._wraps:
            return
        if faint != self._faint:
            self._turn(faint)
        text = printable(piece)
        if not self._wraps:
            self._last = (self._last + text)[-1]
            self._out.write(text)
        else:
            *complete, self._held = _words(self._held + text)
            for word in complete:
                self._place(word)
            if _cells(self._held) > _columns():  # no line has room for it
                self._place(self._held)
                self._held = ""
        self._out.flush()

    def end(self) -> None:
        """Prints what was held back, and ends the line."""
        self._end_line()
        if self._faint:
            self._turn(False)
        self._out.flush()

    def _turn(self, faint: bool) -> None:
        self._end_line()
        self._faint = faint
        self._out.write("\x1b[2m" if faint else "\x1b[0m")

    def _end_line(self) -> None:
        if self._held:
            self._place(self._held)
            self._held = ""
        if self._last != "\n":
            self._write("\n")

    def _place(self, text: str) -> None:
        """A word and the spaces after it: on this line if the word fits, else on the next."""
        columns, word = _columns(), text.rstrip(_SPACES)
        if self._column and self._column + _cells(word) > columns:
            self._write("\n")
        self._write(word)
        # Of a word that is longer than a line, the terminal itself breaks the rest.
        if self._column > columns:
            self._column = (self._column - 1) % columns + 1
        spaces = text[len(word) :]
        if self._column + _cells(spaces) > columns:
            self._column = columns  # the next word begins a line, which is as good as a space
        else:
            self._write(spaces)

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self._column = 0 if self._last == "\n" else self._column + _cells(text)
            self._out.write(text)


def print_line(text: str, out: TextIO) -> None:
    """One text at once, with a line end."""
    printed = Printed(out)
    printed.add(text)
    printed.end()


def _words(text: str) -> list[str]:
    """Line ends, and words with the spaces after them. Chinese and Japanese break anywhere."""
    words = [""]
    for letter in _letters(text):
        if _may_break(words[-1], letter):
            words.append("")
        words[-1] += letter
    return words


def _may_break(word: str, letter: str) -> bool:
    """Whether a line may end between a word and the letter after it."""
    if not word:
        return False
    if "\n" in (word, letter):
        return True
    if letter in _SPACES:
        return False
    if word[-1] in _SPACES:
        return True
    closes = unicodedata.category(letter[0]) in ("Pe", "Pf", "Po")
    opens = unicodedata.category(word[-1]) in ("Ps", "Pi")
    return _cells(letter) == 2 and not closes and not opens


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _letters(text: str) -> Iterator[str]:
    """What a reader sees as one letter: an accent, or a family of emoji, is not taken apart."""
    # Late: only text on a terminal needs its tables.
    import wcwidth

    return wcwidth.iter_graphemes(text)


def _cells(text: str) -> int:
    """How many columns of the terminal a text takes."""
    import wcwidth

    return wcwidth.width(text.replace("\t", " " * 8))
