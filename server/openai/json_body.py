"""Parses the bytes of a request body to one JSON object, strictly.

Refuses what two parsers could read differently: invalid UTF-8, a byte order mark, duplicate
keys, NaN and numbers beyond float, lone surrogates, deep nesting. Knows no field names.
"""

import json
from collections.abc import Mapping
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn, cast

from ropewalk.server.errors import DuplicateKey, InvalidBody, quoted

MAX_DEPTH = 32


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises InvalidBody or DuplicateKey."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidBody("the body is not valid UTF-8; send JSON encoded as UTF-8") from None
    try:
        value = _decoder(text).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise InvalidBody(
            f"the body is not valid JSON at character {error.pos}: {error.msg.lower()}"
        ) from None
    except ValueError:
        # int() refuses thousands of digits; no field takes such a number.
        raise InvalidBody(
            "the body has a number with too many digits; send a smaller one"
        ) from None
    if not isinstance(value, dict):
        raise InvalidBody('the body must be a JSON object, such as {"model": ...}')
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if "\\u" in text:
        _check_surrogates(value)
    return cast(dict[str, Any], value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"the key {quoted(key)} appears twice; send it once")
            seen.add(key)
    return value


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise InvalidBody(f"the number {quoted(text)} is too large; send a finite one")
    return value


def _constant(text: str) -> NoReturn:
    raise InvalidBody(f"{text} is not JSON; send a finite number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)

# The decoder is C, which keeps the interpreter from other threads until it is done, or calls into
# Python: so a long body's integers are read by Python. One that has very many other parts, as few
# honest ones do, is left to the decoder that is all Python.
LONG = 1 << 16  # characters, which take up to some milliseconds
_MANY = 1 << 14  # texts, lists and objects


def _integer(text: str) -> int:
    return int(text)


_PATIENT = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_constant=_constant, parse_int=_integer
)
_SLOW = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
_SLOW.scan_once = py_make_scanner(_SLOW)  # type: ignore[attr-defined]


def _decoder(text: str) -> json.JSONDecoder:
    if len(text) <= LONG:
        return _DECODER
    parts = text.count("[") + text.count("{") + text.count('"') // 2
    return _PATIENT if parts <= _MANY else _SLOW


def _check_depth(value: Mapping[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidBody:
    return InvalidBody(f"the body is nested deeper than {MAX_DEPTH} levels; flatten it")


def _check_surrogates(value: Mapping[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidBody("the body has an unpaired surrogate; send complete characters") from None
