"""What an answer has to look like. Plain data: no library of grammars."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How `Grammar.text` is written."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # JSON
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of strings
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Whoever wants one writes it down; server/structured/compiler.py reads and checks it."""

    kind: Kind
    text: str = ""
