"""How sentences count things up. No torch."""

from collections.abc import Sequence


def listed(words: Sequence[str], last: str = "and") -> str:
    """a, b and c; or another word before the last."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))
