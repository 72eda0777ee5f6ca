"""What an answer has to look like. Plain data: knows no library of grammars."""

from collections.abc import Iterator, Mapping
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
    a line break with an indentation. places: what a client wrote that a line of the text holds, by
    the line's number, from 1.
    """

    kind: Kind
    text: str = ""
    whitespace: str | None = None
    param: str = field(default="response_format", compare=False)  # the client's field, for errors
    places: Mapping[int, str] = field(default_factory=dict, compare=False)  # for errors


def prepared(schema: Any, whitespace: str | None = None) -> Any:
    """A JSON schema for llguidance: closed, with the white space that may stand in JSON, and with
    formats that it knows.

    What is no schema stays as it is, for llguidance to say why. Raises RecursionError where it is
    nested too deeply.
    """
    schema = {} if schema is True else schema
    given = schema.get("x-guidance", {}) if isinstance(schema, Mapping) else None
    if not isinstance(given, Mapping):
        return schema
    schema = _in_known_formats(schema)
    schema = _closed(schema, within=not any(map(_composes, _schemas(schema))))
    pattern = WHITESPACE if whitespace is None else whitespace
    own = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**schema, "x-guidance": {**own, **given}}


def _in_known_formats(schema: Any) -> Any:
    """Without other formats, which annotate a schema (JSON Schema 2020-12, validation, 7.2.1).

    Pydantic and writers of tools have some of their own, such as uuid4, binary and int64.
    """
    if isinstance(schema, list):
        return [_in_known_formats(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for keyword, value in schema.items():
        if keyword in {*_TABLES, "patternProperties"} and isinstance(value, Mapping):
            found[keyword] = {name: _in_known_formats(each) for name, each in value.items()}
        elif keyword in _VALUES:
            found[keyword] = value
        elif keyword != "format" or not isinstance(value, str) or value in _FORMATS:
            found[keyword] = _in_known_formats(value)
    return found


def _closed(schema: Any, within: bool = True) -> Any:
    """With objects that have the properties that are named, unless a schema speaks of others.

    Small models like to make others up, and do not end. What is left satisfies the schema.
    """
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _changed(key, value) if within else value for key, value in schema.items()}
    names, required = schema.get("properties"), schema.get("required", [])
    named = isinstance(names, Mapping) and isinstance(required, list)
    if named and not _OTHERS & set(schema) and set(map(str, required)) <= set(names or ()):
        closed["additionalProperties"] = False
    return closed


def _changed(keyword: str, value: Any) -> Any:
    if keyword in _TABLES and isinstance(value, Mapping):
        return {name: _closed(each) for name, each in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [_closed(each) for each in value]
    return _closed(value) if keyword in _SINGLE else value


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """It and all within it."""
    if isinstance(schema, Mapping):
        yield schema
        for keyword, value in schema.items():
            if keyword in _TABLES and isinstance(value, Mapping):
                value = list(value.values())
            if keyword not in _VALUES:  # a reference may lead anywhere
                yield from _schemas(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _schemas(each)


def _composes(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas may speak of one object, so that none of them names everything."""
    keywords, all_of = set(schema), schema.get("allOf")
    return bool(
        keywords & _BESIDE
        or (isinstance(all_of, list) and len(all_of) > 1)
        or len(keywords & _INSTEAD) > 1
        or (keywords & _INSTEAD and keywords & _OWN)
        or {"properties", "patternProperties"} <= keywords
    )


_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri"}
_FORMATS |= {"uuid"}
_BESIDE = {"not", "if", "dependentSchemas", "$dynamicRef", "oneOf"}
_OWN = {"properties", "required", "minProperties", "const", "enum"}
_INSTEAD = {"allOf", "anyOf", "oneOf", "$ref"}
_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_OTHERS |= {"minProperties", "const", "enum"}
_OTHERS |= _BESIDE | _INSTEAD
_VALUES = {"const", "enum", "default", "examples", "required"}
_TABLES = {"properties", "$defs", "definitions"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_SINGLE = {"items", "additionalProperties"}
