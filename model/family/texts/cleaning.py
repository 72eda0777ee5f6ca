"""Raw text → training text: without the distributor's licence, with uniform quotes and spaces."""

import re

from ropewalk.model.family.texts.sources import Layout

_START = re.compile(r"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG.*$", re.MULTILINE)
_END = re.compile(
    r"^(?:\*\*\* ?END OF TH(?:E|IS)|End of (?:the )?) ?Project Gutenberg.*$", re.M | re.I
)
# One spelling each, as on a keyboard: 4,096 pieces are too few for several.
_SPELLING = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "`": "'", "—": "--", "\xa0": " ", "\t": " "}
    | dict.fromkeys("\ufeff\r\x00\x0c")
)


def strip_gutenberg(text: str) -> str:
    """The text between Project Gutenberg's markers; all of it where there are none."""
    start = _START.search(text)
    text = text[start.end() :] if start else text
    end = _END.search(text)
    return text[: end.start()] if end else text


def clean(raw: str, layout: Layout, start: str = "") -> str:
    """Paragraphs separated by one empty line, no trailing spaces, ending in a newline.

    `start` is how the text begins, if something precedes it. PROSE joins the lines of a
    paragraph; LINES keeps them. Empty when nothing is left.
    """
    text = strip_gutenberg(raw)
    text = text[max(text.find(start), 0) :].translate(_SPELLING)
    lines = [re.sub(r" +", " ", line).strip() for line in text.split("\n")]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    if layout is Layout.PROSE:
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return f"{text}\n" if text else ""
