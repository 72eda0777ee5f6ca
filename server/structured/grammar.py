"""What an answer has to look like. Plain data: knows no library of grammars."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_TEXT = 1 << 18  # characters of a grammar; the largest published schemas in use have some 50,000
WHITESPACE = r" |\n[ \t]{0,32}"  # any number of them would let small models write nothing else


class Kind(StrEnum):
    """How `Grammar.text` is written."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # JSON
    REGEX = "regex"  # of the whole answer, in the dialect of Rust's regex
    CHOICE = "choice"  # a JSON array of strings
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Not checked yet: `Grammars.compile` does that.

    whitespace: a regular expression of what may stand between the parts of JSON; None: a space, or
    a line break with an indentation.
    """

    kind: Kind
    text: str = ""
    whitespace: str | None = None
    param: str = field(default="response_format", compare=False)  # the client's field, for errors


def spaced(schema: Any, whitespace: str | None = None) -> Any:
    """A JSON schema that tells llguidance which white space may stand between the parts of JSON.

    What is no schema stays as it is, for llguidance to say why.
    """
    schema = {} if schema is True else schema
    given = schema.get("x-guidance", {}) if isinstance(schema, Mapping) else None
    if not isinstance(given, Mapping):
        return schema
    pattern = WHITESPACE if whitespace is None else whitespace
    own = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**schema, "x-guidance": {**own, **given}}
