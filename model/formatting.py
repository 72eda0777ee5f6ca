"""Wording shared by several parts of the project. No torch."""

import traceback
from collections.abc import Sequence
from pathlib import Path


def listed(words: Sequence[str], last: str = "and") -> str:
    """Joins words as "a, b and c", or with another word before the last."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def in_one_line(error: Exception) -> str:
    """The error's type and message, without the lines that torch adds."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def where(error: Exception) -> str:
    """The last file and line outside torch on the way to it, and the message, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "torch" not in Path(frame.filename).parts]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}: {in_one_line(error)}"
