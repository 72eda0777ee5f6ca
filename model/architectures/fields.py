"""Strict reading of a model's description: every value is typed, bounded and accounted for.

Knows config.json objects and GGUF metadata as plain mappings, no particular model. What it means
that a key is absent, and who says so, is a table of each family; docs/checkpoints.md shows them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger

from ropewalk.model.weights.base import CheckpointError, shown

log = getLogger(__name__)

# Of what a model may have, so that 0 says that it has none.
COUNTS = frozenset({"expert_count", "expert_used_count", "num_experts", "num_local_experts"})


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


class Fields:
    """Named values of one file. What was not read must be harmless, or `finish` refuses it."""

    def __init__(
        self, where: str, values: Mapping[str, object], absent: Absent | None = None
    ) -> None:
        """absent: what it means that a required key is not there; without, it must be."""
        self.where = where
        self._values = values
        self._absent = absent or {}
        self._read: set[str] = set()
        self._assumed: list[str] = []

    def with_absent(self, absent: Absent) -> "Fields":
        """The same values, what was read and assumed of them included, with a family's defaults."""
        described = Fields(self.where, self._values, absent)
        described._read |= self._read
        described._assumed += self._assumed
        return described

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {reason}.")

    def assume(self, what: str) -> None:
        """Tell in the log, at the end, how something was understood that is not plainly stated."""
        if what not in self._assumed:
            self._assumed.append(what)

    def states(self, key: str) -> bool:
        """Whether the key is there, though it may be null."""
        return key in self._values

    def get(self, key: str) -> object:
        """The value, or None when it is null or absent."""
        self._read.add(key)
        return self._values.get(key)

    def defines(self, key: str) -> bool:
        """Whether the family says what it means that the key is absent."""
        return key in self._absent

    def default(self, key: str) -> object:
        """What it means that the key is absent. Raises CheckpointError."""
        meaning = self._absent.get(key)
        if not isinstance(meaning, Default):
            raise self.missing(key)
        value = meaning.value
        self.assume(
            f"{key} is absent, which means "
            f"{value.key if isinstance(value, Like) else value} ({meaning.by})"
        )
        return self._stated(value.key) if isinstance(value, Like) else value

    def missing(self, key: str) -> CheckpointError:
        meaning = self._absent.get(key)
        if isinstance(meaning, Disputed):
            return self.error(
                f"{key} is missing, and its absence means {meaning.meanings}, so add it"
            )
        return self.error(f"{key} is missing, and guessing it could change the answers")

    def require(self, key: str) -> None:
        """The key must be there, though it may be null."""
        if not self.states(key):
            raise self.missing(key)

    def optional_integer(self, key: str, limit: int) -> int | None:
        """1 .. limit, or None when null or absent."""
        value = self.get(key)
        return None if value is None else self._as_integer(key, value, limit)

    def integer(
        self,
        key: str,
        limit: int,
        *,
        null: int | None = None,
        absent: int | None = None,
        times: int | None = None,
    ) -> int:
        """1 .. limit. null, absent: what that means, absence only if the family does not say.

        times: it may also be a list that has it so many times.
        """
        known = self.states(key) or key in self._absent or absent is None
        value = self._stated(key) if known else absent
        if value is None:
            value = null
        if value is None:
            raise self.missing(key)
        if isinstance(value, list) and value and value == value[:1] * (times or 0):
            value = value[0]
        return self._as_integer(key, value, limit)

    def optional_number(self, key: str, *, zero_is_none: bool = False) -> float | None:
        """A number above 0, below 1e30, or None when null or absent."""
        value = self.get(key)
        if value is None or (zero_is_none and type(value) in (int, float) and value == 0):
            return None
        return self._as_number(key, value)

    def number(self, key: str) -> float:
        value = self.number_or_null(key)
        if value is None:
            raise self.missing(key)
        return value

    def number_or_null(self, key: str) -> float | None:
        """Absent, it means what the family says."""
        value = self._stated(key)
        return None if value is None else self._as_number(key, value)

    def _stated(self, key: str) -> object:
        """The value, None when it is null, and what it means when it is absent."""
        return self.get(key) if self.states(key) else self.default(key)

    def _as_integer(self, key: str, value: object, limit: int) -> int:
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(f"{key} must be an integer from 1 to {limit}, not {_brief(value)}")
        return value

    def _as_number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"{key} must be a number above 0, not {_brief(value)}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """True, False, or None when null or absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {_brief(value)}")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {_brief(value)}")
        return value

    def section(self, key: str) -> "Fields | None":
        """A nested object, to be read and finished like this one."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {_brief(value)}")
        return Fields(f"{self.where}: {key}", value)

    def texts(self, key: str) -> list[str] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key} must be a list of strings, not {_brief(value)}")
        return value

    def token_ids(self, key: str) -> frozenset[int]:
        """One id, a list of ids, or none."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int for item in ids):
            raise self.error(f"{key} must be a token id or a list of them, not {_brief(value)}")
        return frozenset(ids)

    def finish(self, harmless: Callable[[str], bool] = lambda key: False) -> None:
        """Refuse what was not read, is not known to be harmless, and is not switched off.

        It was put there because it changes something; ignoring it would give wrong answers.
        """
        for key in sorted(self._values.keys() - self._read):
            value = self._values[key]
            off = value is None or value is False or value == [] or value == {}
            if off or (value == 0 and key.split(".")[-1] in COUNTS) or harmless(key):
                continue
            raise self.error(f"{shown(key)} = {_brief(value)} is not supported")
        if self._assumed:
            log.info("%s: %s", self.where, "; ".join(self._assumed))


def _brief(value: object) -> str:
    return shown(value) if isinstance(value, str) else shown(repr(value))[1:-1]
