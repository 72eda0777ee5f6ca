"""Chat messages to prompt text, with a checkpoint's own template.

Templates are foreign programs, so they run in processes of their own, which are stopped where they
take too long or too much memory. Knows no tokenizer.
"""

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any

from ropewalk.model.confined.process import Confined, Stopped
from ropewalk.model.tokenizers.tokenizer_config import (
    SpecialTokens,
    read_object,
    read_tokenizer_config,
)

WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
MAX_SOURCE = 1 << 20  # characters of a template; the longest published ones have some 30,000
AT_ONCE = 2  # chats of one template: while one is stuck, others are rendered
MEMORY = 256 << 20  # bytes, besides what the process had before
# Of the processor, which a template always uses: it has nothing to wait for. The waits, by the
# clock, are for machines that are out of breath.
COMPILE_SECONDS = 1.5
RENDER_SECONDS = 0.5
COMPILE_WAIT = 10.0
RENDER_WAIT = 2.0


class ChatTemplateError(ValueError):
    """A template that is broken, or that refuses these messages."""


class ChatTemplate:
    """A template that compiles; chats may be rendered from several threads.

    Its processes are its own, so templates neither see nor delay one another. They end with it.
    """

    def __init__(self, source: str, special_tokens: SpecialTokens) -> None:
        """Tokens that are not declared are undefined in the template. Raises ChatTemplateError."""
        self.source = source
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"The chat template has more than the {MAX_SOURCE} characters allowed: "
                "correct chat_template or serve completions only."
            )
        first = _Renderer(source)
        first.await_compiled()
        self._special_tokens = special_tokens
        self._chats: SimpleQueue[_Chat | None] = SimpleQueue()
        for renderer in (first, *(_Renderer(source) for _ in range(AT_ONCE - 1))):
            arguments = (self._chats, source, renderer)
            Thread(target=_render_all, args=arguments, name="chat template", daemon=True).start()
        weakref.finalize(self, _end, self._chats)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt. Raises ChatTemplateError, with the template's own message if it has one.

        `variables` are whatever else the template may read, `tools` among them; they replace
        neither messages nor special tokens.
        """
        return self.begin(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        ).result()

    def begin(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> Future[str]:
        """What `render` gives, later; it may be cancelled while it waits for others."""
        values = {
            "tools": None,
            "documents": None,
            **variables,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        chat = _Chat(values, Future())
        self._chats.put(chat)
        return chat.text


@dataclass(frozen=True, slots=True)
class _Chat:
    """What a template may read, and what it makes of that."""

    values: Mapping[str, object]
    text: Future[str]


def _render_all(chats: "SimpleQueue[_Chat | None]", source: str, renderer: "_Renderer") -> None:
    """What each thread does: one chat after the other, with a process of its own."""
    while (chat := chats.get()) is not None:
        if chat.text.set_running_or_notify_cancel():
            try:
                renderer = _living(renderer, source)
                chat.text.set_result(renderer.render(chat.values))
            except Exception as error:
                chat.text.set_exception(error)
        del chat
        with suppress(OSError, Stopped):  # a new process compiles while nobody waits for it
            renderer = _living(renderer, source)


def _living(renderer: "_Renderer", source: str) -> "_Renderer":
    """The same one, or another where it has ended."""
    return _Renderer(source) if renderer.ended else renderer


def _end(chats: "SimpleQueue[_Chat | None]") -> None:
    for _ in range(AT_ONCE):
        chats.put(None)


class _Renderer:
    """A process for one template."""

    def __init__(self, source: str) -> None:
        """Returns while the template is being compiled."""
        self._process = Confined("ropewalk.model.chat.process", ["jinja2", "markupsafe"], MEMORY)
        self._compiled = False
        self._begin({"source": source}, COMPILE_SECONDS, COMPILE_WAIT)

    @property
    def ended(self) -> bool:
        return self._process.ended

    def await_compiled(self) -> None:
        """Raises ChatTemplateError."""
        if self._compiled:
            return
        try:
            self._result(COMPILE_WAIT)
            self._compiled = True
        except Stopped as error:
            raise ChatTemplateError(
                f"The chat template cannot be compiled ({error}): "
                "correct chat_template or serve completions only."
            ) from None
        finally:
            if not self._compiled:
                self._process.end()

    def render(self, values: Mapping[str, object]) -> str:
        """Raises ChatTemplateError."""
        self.await_compiled()
        try:
            self._begin(values, RENDER_SECONDS, RENDER_WAIT)
            return self._result(RENDER_WAIT)
        except RecursionError:
            raise ChatTemplateError(
                "The chat template failed on these messages (they are nested too deeply): "
                "check their roles and contents."
            ) from None
        except Stopped as error:
            raise ChatTemplateError(
                f"The chat template was stopped on these messages ({error}): "
                "send fewer or shorter ones."
            ) from None

    def _begin(self, work: Mapping[str, object], seconds: float, wait: float) -> None:
        data = json.dumps(work, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self._process.tell(data, seconds=seconds, wait=wait)

    def _result(self, wait: float) -> str:
        # Not to be trusted: a template may have got out of its sandbox.
        try:
            result = json.loads(self._process.hear(wait=wait).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            result = None
        match result:
            case {"text": str(text)}:
                return text
            case {"error": str(error)}:
                raise ChatTemplateError(error)
        self._process.end()
        raise ChatTemplateError(
            "The chat template's process gave no result: correct chat_template."
        )


def chat_template_from_directory(path: Path, other: Path | None = None) -> ChatTemplate | None:
    """From chat_template.jinja, tokenizer_config.json or chat_template.json; None without one.

    Beside the first may be one for chats with tools. `other` is a file to read instead of all.
    Raises ChatTemplateError, and TokenizerError when a file cannot be read.
    """
    config = read_tokenizer_config(path)
    beside = other or path / "chat_template.jinja"
    if beside.is_file():
        plain = _read(beside)
        with_tools = path / WITH_TOOLS
        both = other is None and with_tools.is_file()
        source: object = _joined(plain, _read(with_tools)) if both else plain
    else:
        fields = read_object(path / "chat_template.json") or {}
        source = config.chat_template or fields.get("chat_template")
    return _from_source(source, config.special_tokens)


def chat_template_from_gguf(
    metadata: Mapping[str, object], other: Path | None = None
) -> ChatTemplate | None:
    """From `tokenizer.chat_template`; None without one.

    Beside it may be one for chats with tools. `other` and errors as for a directory.
    """
    source = metadata.get("tokenizer.chat_template") if other is None else _read(other)
    if source is None:
        return None
    with_tools = metadata.get("tokenizer.chat_template.tool_use")
    if other is None and isinstance(source, str) and isinstance(with_tools, str):
        source = _joined(source, with_tools)
    from ropewalk.model.tokenizers.gguf_fields import TokenizerFields

    return _from_source(source, TokenizerFields(metadata).special_tokens())


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as text:
            return text.read(MAX_SOURCE + 1)
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
    """In checkpoints with several templates, the plain one is named `default`.

    One named `tool_use` is for chats with tools, so that both together are the template.
    """
    templates = {
        entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)
    }
    if "default" not in templates:
        raise ChatTemplateError(
            f"None of the chat templates {sorted(map(str, templates))} is named default: "
            "give that name to the one to use."
        )
    plain, with_tools = templates["default"], templates.get("tool_use")
    if isinstance(plain, str) and isinstance(with_tools, str):
        return _joined(plain, with_tools)
    return plain


def _joined(plain: str, with_tools: str) -> str:
    """One template that writes what either writes alone."""
    # The environment drops the line break after a tag, and of a whole template the last one; "+"
    # keeps it from dropping the blanks before a tag.
    first, second = map(_without_last_break, (with_tools, plain))
    return f"{{% if tools %}}\n{first}{{%+ else %}}\n{second}{{%+ endif %}}"


def _without_last_break(source: str) -> str:
    return re.sub(r"(\r\n|\r|\n)\Z", "", source)
