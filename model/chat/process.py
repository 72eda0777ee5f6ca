"""What a confined process does with chat templates: compiles one, then renders chats with it.

The dialect is that of the Hugging Face hub. Foreign programs run here in jinja2's sandbox; the
limits on their time and memory are the process's.
"""

import codecs
import importlib
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ropewalk.model.confined.inside import answer

MAX_PROMPT = 16 * 1024 * 1024  # characters a template may write
MAX_ERROR = 500  # characters
# What Python and jinja2 import only when a template needs it, when no file can be opened any more.
LATER = ("jinja2.debug", "textwrap", "unicodedata")
CODECS = ("ascii", "latin-1", "unicode_escape")


class Refused(Exception):
    """One sentence for whoever sent the messages."""


class Renderer:
    """Each piece of work is a JSON object: first the source, then the variables of each chat."""

    def __init__(self) -> None:
        self._template: jinja2.Template | None = None

    def __call__(self, work: bytes) -> bytes:
        """{"text": …} or {"error": …}; the former is empty when the template is compiled."""
        try:
            result = {"text": self._done(json.loads(work.decode("utf-8", "surrogatepass")))}
        except Refused as error:
            result = {"error": str(error)[:MAX_ERROR]}
        return json.dumps(result, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def _done(self, work: dict[str, Any]) -> str:
        if self._template is None:
            self._template = _compiled(work["source"])
            return ""
        return _rendered(self._template, work)


def _compiled(source: str) -> jinja2.Template:
    try:
        return _Environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:
        raise Refused(
            f"The chat template cannot be compiled ({_one_line(error)}): "
            "correct chat_template or serve completions only."
        ) from None


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        return _join(template.generate(variables))
    except (Refused, MemoryError):
        raise
    except Exception as error:  # a template can raise anything that Python can
        raise Refused(
            f"The chat template failed on these messages ({_one_line(error)}): "
            "check their roles and contents."
        ) from None


def _join(pieces: Any) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_PROMPT:
            raise Refused(
                f"The chat template writes more than {MAX_PROMPT} characters: "
                "send shorter messages."
            )
        parts.append(piece)
    return "".join(parts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Environment(ImmutableSandboxedEnvironment):
    """The template dialect of the Hugging Face hub."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; here its body is ordinary text."""

    tags: frozenset[str] = frozenset({"generation"})  # type: ignore[assignment]  # a set upstream

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, escapes nothing for HTML: models were trained without that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> str:
    raise Refused(f"The chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


if __name__ == "__main__":
    for module in LATER:
        importlib.import_module(module)
    for codec in CODECS:
        codecs.lookup(codec)
    answer(Renderer())
