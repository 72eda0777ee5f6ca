"""`--config FILE`: values for the options of `ropewalk serve`, as TOML. No torch.

A key is a flag's name, with dashes or underscores. What host, port, uds and ssl-certfile say also
tells chat and health where the server is.
"""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk.server.cli.options.base import Option, Set, nearest, read_options
from ropewalk.server.cli.options.serve import CONFIG, SERVE_OPTIONS
from ropewalk.server.errors import UsageError


def read_all(
    options: tuple[Option, ...], flags: argparse.Namespace, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Every option's value by name; a flag beats its variable, and that the file."""
    file = read_options((CONFIG,), flags, environ)[CONFIG.name]
    return read_options(options, flags, environ, {} if file is None else settings(file))


def settings(file: Path) -> dict[str, Set]:
    """By variable, what the file sets. Raises UsageError."""
    known = {option.name: option for option in SERVE_OPTIONS if option is not CONFIG}
    found = {}
    for key, value in _table(file).items():
        option = known.get(key.replace("-", "_"))
        if option is None:
            names = [name.replace("_", "-") for name in known]
            hint = nearest(key.replace("_", "-"), names)
            raise UsageError(
                f"{file}: {key} is not a setting of ropewalk serve; "
                + (f"did you mean {hint}?" if hint else "ropewalk serve --help lists the flags")
            )
        if option.variable in found:
            raise UsageError(f"{file}: {key} is set twice; leave one out")
        found[option.variable] = Set(f"{file}: {key}", _text(file, key, value, option))
    return found


def _table(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config: {file} cannot be read ({error.strerror})") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(f"--config: {file} is not TOML: {error}") from error


def _text(file: Path, key: str, value: object, option: Option) -> str | list[str]:
    """The value as a flag would give it, so that it is parsed and refused in the same words."""
    if option.many:
        parts = value if isinstance(value, list) else [value]
        if not parts:  # no keys must not mean open to all
            raise UsageError(f"{file}: {key} lists no value; leave it out or add one")
        return [_word(file, key, part) for part in parts]
    return _word(file, key, value)


def _word(file: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    kinds: dict[type, str] = {list: "a list", dict: "a table"}
    kind = kinds.get(type(value), "a date")
    raise UsageError(f"{file}: {key} is {kind}; write text, a number, true or false")
