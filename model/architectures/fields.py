"""Strict reading of a model's description: every value is typed, bounded and accounted for.

Knows config.json objects and GGUF metadata as plain mappings, no particular model.
"""

from collections.abc import Iterable, Mapping

from model.weights.base import CheckpointError, shown


class Fields:
    """Named values of one file. What was not read must be harmless, or `finish` refuses it."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self.where = where
        self._values = values
        self._read: set[str] = set()

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {reason}.")

    def get(self, key: str) -> object:
        """The value, or None when it is null or absent."""
        self._read.add(key)
        return self._values.get(key)

    def missing(self, key: str) -> CheckpointError:
        return self.error(f"{key} is missing, and guessing it could change the answers")

    def require(self, key: str) -> None:
        """The key must be there, though it may be null."""
        if key not in self._values:
            raise self.missing(key)

    def optional_integer(self, key: str, limit: int) -> int | None:
        """1 .. limit, or None when null or absent."""
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(f"{key} must be an integer from 1 to {limit}, not {_brief(value)}")
        return value

    def integer(self, key: str, limit: int) -> int:
        value = self.optional_integer(key, limit)
        if value is None:
            raise self.missing(key)
        return value

    def optional_number(self, key: str) -> float | None:
        """A number above 0, below 1e30, or None when null or absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"{key} must be a number above 0, not {_brief(value)}")
        return float(value)

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self.missing(key)
        return value

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

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuse what was not read, is not known to be harmless, and is not switched off.

        It was put there because it changes something; ignoring it would give wrong answers.
        """
        for key in sorted(self._values.keys() - self._read - set(harmless)):
            value = self._values[key]
            if value is None or value is False or value == [] or value == {}:
                continue
            raise self.error(f"{shown(key)} = {_brief(value)} is not supported")


def _brief(value: object) -> str:
    return shown(value) if isinstance(value, str) else shown(repr(value))[1:-1]
