"""Options by click: one declaration gives a flag, its variable, its help and its key in a file.

A flag beats its variable, a variable what a file sets, and that the default. All are text that is
parsed in one place, so all are refused in the same words. Knows no particular option. No torch.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import Any

import click
from click.core import ParameterSource
from click.exceptions import NoSuchCommand
from click.shell_completion import CompletionItem

from ropewalk.model.formatting import listed
from ropewalk.server.errors import UsageError, nearest

PREFIX = "ROPEWALK_"
OTHER_VARIABLES = ("ROPEWALK_HOME",)
# Kubernetes sets these in every pod beside a Service whose name begins with "ropewalk".
_LINK_NAME = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class Variable(click.Parameter):
    """A parameter that also has an environment variable, and a key in the file of --config."""

    shown: str  # the default in words; empty: the default itself

    @property
    def key(self) -> str:
        """As the file of --config and a message name it."""
        return self.opts[0].removeprefix("--")

    @property
    def values(self) -> tuple[str, ...]:
        """The words that it takes, and what else by its kind."""
        return self.type.values if isinstance(self.type, Value) else ("on", "off")

    @property
    def default_in_words(self) -> str:
        if self.shown or self.default in (None, ()):
            return self.shown or "none"
        return ("off", "on")[self.default] if isinstance(self.default, bool) else str(self.default)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        term, text = super().get_help_record(ctx) or ("", "")
        return term, f"{text} (default: {self.default_in_words}; {self.envvar})"

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        text = super().resolve_envvar_value(ctx)
        return text if text and text.strip() else None  # blank is how compose files say "unset"

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        if value == []:  # commas around unset variables: no keys must not mean open to all
            raise click.BadParameter("it lists no value; leave it out or add one", ctx, self)
        return super().type_cast_value(ctx, value)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Where the value came from."""
        source = ctx and ctx.get_parameter_source(self.name)
        if source is ParameterSource.ENVIRONMENT:
            return str(self.envvar)
        if ctx and source is ParameterSource.DEFAULT_MAP:
            return f"{ctx.params['config']}: {self.key}"
        return self.opts[0] if self.opts[0].startswith("--") else self.human_readable_name


class Setting(Variable, click.Option):
    """A flag with a variable: `prefix` and the flag's name, in the plural if it is repeatable.

    One whose default is True or False also has the flag --no-NAME.
    """

    def __init__(
        self,
        section: str,
        flag: str,
        help: str,
        type: "Value | None" = None,
        default: Any = None,
        shown: str = "",
        *,
        prefix: str = PREFIX,
        multiple: bool = False,
        **more: Any,
    ) -> None:
        name = flag.removeprefix("--")
        switch = isinstance(default, bool)
        super().__init__(
            [f"{flag}/--no-{name}" if switch else flag],
            help=help,
            type=Switch() if switch else type or Value(str),
            default=() if multiple else default,
            multiple=multiple,
            envvar=prefix + name.replace("-", "_").upper() + "S" * multiple,
            **more,
        )
        self.section, self.shown = section, shown


class SettingArgument(Variable, click.Argument):
    """Words without a flag, with a variable."""

    def __init__(self, name: str, help: str, type: "Value", shown: str, **more: Any) -> None:
        super().__init__([name], help=help, type=type, envvar=PREFIX + name.upper(), **more)
        self.shown = shown


class Command(click.Command):
    """Shows options by section, and its epilog as it is written; refuses misspelt variables."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for name, some in groupby(options, lambda option: getattr(option, "section", "Options")):
            with formatter.section(name):
                formatter.write_dl(filter(None, (option.get_help_record(ctx) for option in some)))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{self.epilog}" if self.epilog else "")

    def invoke(self, ctx: click.Context) -> Any:
        root = ctx.find_root()
        try:
            refuse_unknown(os.environ, [*OTHER_VARIABLES, *variables([self])])
        except UsageError:
            if not isinstance(root.command, click.Group):
                raise
            # It may be another command's, all of which are imported only now.
            names = root.command.list_commands(root)
            commands = [root.command.get_command(root, name) for name in names]
            refuse_unknown(os.environ, [*OTHER_VARIABLES, *variables(filter(None, commands))])
        return super().invoke(ctx)


class Group(click.Group):
    """Lists its commands in the order of `names`. One that was not added is in a file of its name.

    That is imported when the command is asked for, so that no other command waits for it.
    """

    format_epilog = Command.format_epilog

    def __init__(self, *args: Any, names: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self._names = names

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(self._names or self.commands)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self._names and name not in self.commands:
            found: click.Command = getattr(import_module(f"{__package__}.{name}"), name)
            return found
        return super().get_command(ctx, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:  # which was compared with the added ones alone
            known = self.list_commands(ctx)
            raise NoSuchCommand(error.command_name, possibilities=known, ctx=ctx) from None


def settings_of(command: click.Command) -> list[Variable]:
    """Its parameters that have a variable."""
    return [each for each in command.params if isinstance(each, Variable)]


def variables(commands: Iterable[click.Command]) -> set[str]:
    """All variables that some of the commands read."""
    return {str(each.envvar) for command in commands for each in settings_of(command)}


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


TRUST = (
    "encoding outside Ropewalk, as package.module:Class, whose code may run where a checkpoint "
    "names it; repeatable"
)
A_MODEL = (
    "a Hugging Face directory, a .gguf file, smollm2, a hub id owner/name or, for example, "
    "ropewalk-t5 for one of the bundled models"
)
trust_encoding = click.option("--trust-encoding", multiple=True, metavar="NAME", help=TRUST)


# ---- text → value ----

_SCALE = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:_\d+)*)([km]?)", re.IGNORECASE)


class Value(click.ParamType[Any]):
    """What `parse` makes of a text; its ValueError has the reason and an example.

    A shell completes the `words`. A list in a variable is separated by commas.
    """

    def __init__(
        self, parse: Callable[[str], Any], name: str = "text", words: tuple[str, ...] = ()
    ) -> None:
        self.parse, self.name, self.words = parse, name, words

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "|".join(self.values)

    @property
    def values(self) -> tuple[str, ...]:
        """The words, and the name of anything else that it takes."""
        return (*self.words, self.name.upper()) if self.name else self.words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def split_envvar_value(self, rv: str) -> list[str]:
        return [part.strip() for part in rv.split(",") if part.strip()]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if self.name in ("file", "path", "model"):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(word) for word in self.words if word.startswith(incomplete)]


class Switch(click.types.BoolParamType):
    """on, 1, true or yes; off, 0, false or no."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        found = value if isinstance(value, bool) else self.str_to_bool(value)
        if found is None or value == "":
            self.fail(f"{value!r} is neither on nor off; write 1 or 0", param, ctx)
        return found


def choice(*choices: str) -> Value:
    """One of the given words."""

    def parse(value: str) -> str:
        if value in choices:
            return value
        raise ValueError(f"{value!r} is not one of the choices; use {listed(choices, 'or')}")

    return Value(parse, "", choices)


def auto(value: Value) -> Value:
    """ "auto" is None; anything else is a `value`."""
    words = ("auto", *value.words)
    return Value(lambda text: None if text == "auto" else value.parse(text), value.name, words)


def count(low: int, high: int) -> Value:
    """Whole numbers, also as 8k for 8192 or as 14_000_000; both bounds included."""

    def parse(value: str) -> int:
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a whole number; write for example 64 or 8k")
        number = int(match[1]) * _SCALE[match[2].lower()]
        if not low <= number <= high:
            raise ValueError(f"{value} is outside {low} to {high}")
        return number

    return Value(parse, "number")


def _port(value: str) -> int:
    if _LINK_ADDRESS.match(value):
        raise ValueError(
            f"{value} was set by Kubernetes for a Service of that name; rename the Service or set "
            "enableServiceLinks: false"
        )
    found: int = count(0, 65535).parse(value)
    return found


def _size(value: str) -> int:
    match = _BYTES.fullmatch(value.strip())
    if match is None or (found := int(float(match[1]) * _SCALE[match[2].lower()])) == 0:
        raise ValueError(f"{value!r} is not an amount of memory; write for example 1GiB or 512M")
    return found


PORT = Value(_port, "number")
# 1GiB, 512M, 1073741824: powers of 1024 in every spelling.
SIZE = Value(_size, "bytes")
SIZE_OR_NONE = Value(lambda value: 0 if value.strip() == "0" else _size(value), "bytes")


def number(low: float, high: float, unit: str = "") -> Value:
    """Decimal numbers, both bounds included. `unit` may follow."""

    def parse(value: str) -> float:
        try:
            result = float(value.strip().removesuffix(unit))
        except ValueError:
            raise ValueError(f"{value!r} is not a number; write for example {high:g}") from None
        if not low <= result <= high:  # nan too
            raise ValueError(f"{value} is outside {low:g} to {high:g}")
        return result

    return Value(parse, "seconds" if unit else "number")


def seconds(low: float, high: float) -> Value:
    """A decimal number of seconds: 30 or 1.5s."""
    return number(low, high, "s")
