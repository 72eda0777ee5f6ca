"""What an answer has to look like. Plain data: knows no library of grammars."""

from dataclasses import dataclass, field
from enum import StrEnum

MAX_TEXT = 1 << 18  # characters of a grammar; the largest published schemas in use have some 50,000


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
