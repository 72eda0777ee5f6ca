"""Wording shared by several parts of the project. No torch."""

from collections.abc import Sequence


def listed(words: Sequence[str], last: str = "and") -> str:
    """Joins words as "a, b and c", or with another word before the last."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def in_one_line(error: Exception) -> str:
    """The error's type and message, without the lines that torch adds."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
