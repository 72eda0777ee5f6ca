"""What it means that a required key of a description is absent, and who says so.

Each family has a table of its own; docs/checkpoints.md shows them all. Knows no particular key.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Like:
    """The value of another key."""

    key: str


@dataclass(frozen=True, slots=True)
class Default:
    """What an absent key means, and who says so."""

    value: int | float | Like
    by: str


@dataclass(frozen=True, slots=True)
class Disputed:
    """An absent key that does not mean the same to everybody, so a file must state it."""

    meanings: str  # after "its absence means"


Absent = dict[str, Default | Disputed]


def by(who: str, /, **values: int | float | Like) -> Absent:
    """Defaults from one source."""
    return {key: Default(value, who) for key, value in values.items()}


def prefixed(absent: Absent, prefix: str) -> Absent:
    """The same of keys that all begin so."""
    return {prefix + key: _behind(what, prefix) for key, what in absent.items()}


def _behind(what: Default | Disputed, prefix: str) -> Default | Disputed:
    if isinstance(what, Default) and isinstance(what.value, Like):
        return Default(Like(prefix + what.value.key), what.by)
    return what
