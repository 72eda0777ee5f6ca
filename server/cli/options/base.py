"""Command line options: one table entry gives a flag, its environment variable and its help line.

A flag overrides its variable, a variable what a file sets, and that the default. All are text that
is parsed in one place, so all are refused in the same words. Knows no particular option. No torch.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ropewalk.model.formatting import listed
from ropewalk.server.errors import UsageError

Value = TypeVar("Value")

PREFIX = "ROPEWALK_"
# Kubernetes sets these in every pod beside a Service whose name begins with "ropewalk".
_LINK_NAME = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Option:
    """A flag and its variable. `parse` raises ValueError; `read_options` adds the option's name."""

    flag: str
    group: str
    help: str
    parse: Callable[[str], Any]
    default: Any = None
    shown: str = ""  # the default in words; empty: the default itself
    metavar: str = ""
    env: str = ""  # empty: ROPEWALK_ and the flag's name
    many: bool = False  # the flag may be repeated; the variable is a comma-separated list

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        return self.env or PREFIX + self.name.upper()

    @property
    def switch(self) -> bool:
        return self.parse is switch

    def help_line(self) -> str:
        shown = self.shown or ("on" if self.default is True else str(self.default))
        return f"{self.help} (default: {shown}; {self.variable})".replace("%", "%%")


@dataclass(frozen=True, slots=True)
class Set:
    """A value from a file. `where` names its place in messages."""

    where: str
    text: str | list[str]


class _Switch(argparse.Action):
    """--x and --no-x, so that a flag can override a variable in either direction."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, "off" if (option_string or "").startswith("--no-") else "on")


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Flags stay text; `read_options` parses them after it has read the variables."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        target = groups[option.group]
        if not option.flag.startswith("--"):
            target.add_argument(
                option.name, nargs="*", metavar=option.metavar, help=option.help_line()
            )
        elif option.switch:
            target.add_argument(
                option.flag,
                "--no-" + option.flag.removeprefix("--"),
                dest=option.name,
                action=_Switch,
                nargs=0,
                help=option.help_line(),
            )
        else:
            target.add_argument(
                option.flag,
                dest=option.name,
                metavar=option.metavar,
                action="append" if option.many else "store",
                help=option.help_line(),
            )


def read_options(
    options: Iterable[Option],
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    file: Mapping[str, Set] = MappingProxyType({}),
) -> dict[str, Any]:
    """Every option's value by name. `file` has values by variable.

    UsageError names the flag, the variable or the place in the file that is at fault.
    """
    return {
        option.name: _read(option, getattr(flags, option.name), environ, file) for option in options
    }


def _read(
    option: Option,
    given: str | list[str] | None,
    environ: Mapping[str, str],
    file: Mapping[str, Set],
) -> Any:
    if given:
        label = option.flag if option.flag.startswith("--") else option.metavar
        return _parse(option, label, given)
    text = environ.get(option.variable, "")
    if not text.strip():  # an empty variable is how compose files say "unset"
        if option.variable not in file:
            return option.default
        return _parse(option, file[option.variable].where, file[option.variable].text)
    if _LINK_ADDRESS.match(text):
        raise UsageError(
            f"{option.variable}={text} was set by Kubernetes for a Service of that name; "
            "rename the Service or set enableServiceLinks: false"
        )
    if not option.many:
        return _parse(option, option.variable, text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:  # commas around unset variables: no keys must not mean open to all
        raise UsageError(f"{option.variable}={text} lists no value; unset it or add one")
    return _parse(option, option.variable, parts)


def _parse(option: Option, label: str, text: str | list[str]) -> Any:
    try:
        if isinstance(text, list):
            return tuple(option.parse(part) for part in text)
        return option.parse(text)
    except ValueError as error:
        raise UsageError(f"{label}: {error}") from error


def refuse_unknown(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Raises UsageError for a misspelt variable, which must not be ignored silently."""
    names = set(known)
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in names:
            continue
        linked = variable.endswith("_PORT") and _LINK_ADDRESS.match(value)
        if linked or _LINK_NAME.search(variable):
            continue
        close = nearest(variable, names)
        hint = f"did you mean {close}?" if close else "ropewalk serve --help lists them"
        raise UsageError(f"the environment variable {variable} is not known to ropewalk; {hint}")


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """--trust-encoding, as `ropewalk serve` has it."""
    parser.add_argument(
        "--trust-encoding",
        action="append",
        default=[],
        metavar="NAME",
        help="encoding outside Ropewalk, as package.module:Class, whose code may run where a "
        "checkpoint names it; repeatable",
    )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.75)), None)


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """`parse` for a plain argparse flag: argparse shows the message of no other error."""

    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


# ---- text → value: each raises ValueError with the reason and an example ----

_SCALE = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:_\d+)*)([km]?)", re.IGNORECASE)
_ON, _OFF = {"on", "1", "true", "yes"}, {"off", "0", "false", "no"}


def switch(value: str) -> bool:
    """on, 1, true or yes; off, 0, false or no."""
    if value.lower() in _ON | _OFF:
        return value.lower() in _ON
    raise ValueError(f"{value!r} is neither on nor off; write 1 or 0")


def choice(*choices: str) -> Callable[[str], str]:
    """One of the given words."""

    def parse(value: str) -> str:
        if value in choices:
            return value
        raise ValueError(f"{value!r} is not one of the choices; use {listed(choices, 'or')}")

    return parse


def count(low: int, high: int) -> Callable[[str], int]:
    """Whole numbers, also as 8k for 8192 or as 14_000_000; both bounds included."""

    def parse(value: str) -> int:
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a whole number; write for example 64 or 8k")
        number = int(match[1]) * _SCALE[match[2].lower()]
        if not low <= number <= high:
            raise ValueError(f"{value} is outside {low} to {high}")
        return number

    return parse


def size(value: str) -> int:
    """Bytes: 1GiB, 512M, 1073741824. Powers of 1024 in every spelling."""
    match = _BYTES.fullmatch(value.strip())
    if match is None or (number := int(float(match[1]) * _SCALE[match[2].lower()])) == 0:
        raise ValueError(f"{value!r} is not an amount of memory; write for example 1GiB or 512M")
    return number


def size_or_none(value: str) -> int:
    """As `size`, or 0."""
    return 0 if value.strip() == "0" else size(value)


def number(low: float, high: float, unit: str = "") -> Callable[[str], float]:
    """Decimal numbers, both bounds included. `unit` may follow."""

    def parse(value: str) -> float:
        try:
            result = float(value.strip().removesuffix(unit))
        except ValueError:
            raise ValueError(f"{value!r} is not a number; write for example {high:g}") from None
        if not low <= result <= high:  # nan too
            raise ValueError(f"{value} is outside {low:g} to {high:g}")
        return result

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """A decimal number of seconds: 30 or 1.5s."""
    return number(low, high, "s")


def auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """ "auto" is None; anything else goes to `parse`."""

    def either(value: str) -> Any:
        return None if value == "auto" else parse(value)

    return either
