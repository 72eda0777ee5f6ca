"""Chat messages to prompt text, with a checkpoint's own template.

Templates are foreign programs: they run in jinja2's sandbox, with limits on what they may build,
and whatever they raise becomes a ChatTemplateError. Knows no tokenizer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.tokenizers.gguf_fields import TokenizerFields
from model.tokenizers.tokenizer_config import SpecialTokens, read_object, read_tokenizer_config

_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")  # a padding width of five digits, or a computed one
MAX_PROMPT = 16 * 1024 * 1024  # characters a template may write


class ChatTemplateError(jinja2.TemplateError):
    """A template that is broken, or that refuses these messages."""


class ChatTemplate:
    """A compiled template; rendering is safe from several threads."""

    def __init__(self, source: str, special_tokens: SpecialTokens) -> None:
        """Tokens that are not declared are undefined in the template. Raises ChatTemplateError."""
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ChatTemplateError(
                f"The chat template cannot be compiled ({_one_line(error)}): "
                "correct chat_template or serve completions only."
            ) from None
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt. Raises ChatTemplateError, with the template's own message if it has one.

        `variables` are whatever else the template may read; they replace none of its own.
        """
        values = {
            **variables,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return _join(self._template.generate(values))
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can raise anything that Python can
            raise ChatTemplateError(
                f"The chat template failed on these messages ({_one_line(error)}): "
                "check their roles and contents."
            ) from None


def chat_template_from_directory(path: Path, other: Path | None = None) -> ChatTemplate | None:
    """From chat_template.jinja, tokenizer_config.json or chat_template.json; None without one.

    `other` is a file to read instead. Raises ChatTemplateError, and TokenizerError when a
    file cannot be read.
    """
    config = read_tokenizer_config(path)
    beside = other or path / "chat_template.jinja"
    if beside.is_file():
        source: object = _read(beside)
    else:
        fields = read_object(path / "chat_template.json") or {}
        source = config.chat_template or fields.get("chat_template")
    return _from_source(source, config.special_tokens)


def chat_template_from_gguf(
    metadata: Mapping[str, object], other: Path | None = None
) -> ChatTemplate | None:
    """From `tokenizer.chat_template`; None without one. `other` and errors as for a directory."""
    source = metadata.get("tokenizer.chat_template") if other is None else _read(other)
    if source is None:
        return None
    return _from_source(source, TokenizerFields(metadata).special_tokens())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ChatTemplateError(
            f"{file.name} is not valid UTF-8 ({error}): fetch it again."
        ) from None


def _from_source(source: object, special_tokens: SpecialTokens) -> ChatTemplate | None:
    if source is None:
        return None
    if isinstance(source, list):
        source = _default_of(source)
    if not isinstance(source, str):
        raise ChatTemplateError(
            "chat_template must be a text or a list of named texts: correct the file."
        )
    return ChatTemplate(source, special_tokens)


def _default_of(named: list[Any]) -> object:
    """In checkpoints with several templates, the plain one is named `default`."""
    templates = {
        entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)
    }
    if "default" not in templates:
        raise ChatTemplateError(
            f"None of the chat templates {sorted(map(str, templates))} is named default: "
            "give that name to the one to use."
        )
    return templates["default"]


def _join(pieces: Any) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_PROMPT:
            raise _too_long()
        parts.append(piece)
    return "".join(parts)


def _too_long() -> ChatTemplateError:
    return ChatTemplateError(
        f"The chat template writes more than {MAX_PROMPT} characters: send shorter messages."
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Environment(ImmutableSandboxedEnvironment):
    """The template dialect of the Hugging Face hub, without ways to build huge values."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse repetitions, powers and padding by % that could exhaust the memory."""
        if operator == "*" and _product_size(left, right) > MAX_PROMPT:
            raise _too_long()
        if operator == "**" and not (abs(left) <= 2**16 and abs(right) <= 64):
            raise ChatTemplateError("The chat template raises to too high a power: correct it.")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise _too_long()
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse huge integer arguments: methods take them only as a length to pad text to."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_PROMPT:
                raise _too_long()
        return super().call(context, function, *args, **kwargs)


def _product_size(left: Any, right: Any) -> int:
    """The length of a repeated sequence; 0 for a product of numbers."""
    if isinstance(right, str | list | tuple):
        left, right = right, left
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return len(left) * right
    return 0


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
    raise ChatTemplateError(f"The chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
