"""`--config FILE`: values for the options of `ropewalk serve`, as TOML. No torch.

A key is a flag's name, with dashes or underscores. What host, port, uds and ssl-certfile say also
tells chat and health where the server is.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ropewalk.server.cli.options import Setting, Value, Variable, settings_of
from ropewalk.server.config import existing_file
from ropewalk.server.errors import UsageError, nearest


def config_option(section: str, help: str, known: Sequence[Variable]) -> Setting:
    """Gives its command the values that the file has for it; the file may set all `known`."""

    def read(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
        if file is not None and not ctx.resilient_parsing:
            found = settings(file, known)
            own = settings_of(ctx.command)
            ctx.default_map = {
                each.name: found[each.envvar] for each in own if each.envvar in found
            }
        return file

    return Setting(
        section,
        "--config",
        help,
        Value(existing_file, "file"),
        is_eager=True,  # before the others ask for their defaults
        callback=read,
    )


def settings(file: Path, known: Sequence[Variable]) -> dict[str, Any]:
    """By variable, what the file sets. Raises UsageError."""
    by_key = {each.key: each for each in known}
    found: dict[str, Any] = {}
    for key, value in _table(file).items():
        setting = by_key.get(key.replace("_", "-"))
        if setting is None:
            hint = nearest(key.replace("_", "-"), by_key)
            raise UsageError(
                f"{file}: {key} is not a setting of ropewalk serve; "
                + (f"did you mean {hint}?" if hint else "ropewalk serve --help lists the flags")
            )
        if setting.envvar in found:
            raise UsageError(f"{file}: {key} is set twice; leave one out")
        found[str(setting.envvar)] = _text(file, key, value, setting)
    return found


def _table(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config: {file} cannot be read ({error.strerror})") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(f"--config: {file} is not TOML: {error}") from error


def _text(file: Path, key: str, value: object, setting: Variable) -> str | list[str]:
    """The value as a flag would give it, so that it is parsed and refused in the same words."""
    if setting.multiple or setting.nargs == -1:
        return [_word(file, key, part) for part in (value if isinstance(value, list) else [value])]
    return _word(file, key, value)


def _word(file: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    kinds: dict[type, str] = {list: "a list", dict: "a table"}
    kind = kinds.get(type(value), "a date")
    raise UsageError(f"{file}: {key} is {kind}; write text, a number, true or false")
