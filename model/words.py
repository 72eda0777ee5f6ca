"""Words of sentences that several parts of the project say. No torch."""

from collections.abc import Sequence


def listed(words: Sequence[str], last: str = "and") -> str:
    """a, b and c; or another word before the last."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def in_one_line(error: Exception) -> str:
    """What kind it is and what it says, without the lines that torch adds."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
