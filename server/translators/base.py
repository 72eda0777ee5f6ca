"""What translators share: the fields that they leave to chat, and an answer as a list of parts.

A translator makes a chat's body of another API's body, and is the Wire that makes that API's
answers and events of what chat generates. Chat checks, runs and ends the request.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from json import dumps
from typing import Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator

from ropewalk.server.errors import InvalidField, UnsupportedField
from ropewalk.server.openai.answers import PING, Choice, Piece, Wire
from ropewalk.server.openai.schemas import ChatBody, GenerationBody, TemplateBody
from ropewalk.server.tools.parser import Delta

Fields = dict[str, Any]
Kind = Literal["reasoning", "text", "call"]


class HasText(Protocol):
    @property
    def text(self) -> str: ...


def chat_content(content: str | Sequence[HasText]) -> str | list[Fields]:
    """As chat's content, which joins its parts."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content] or ""


class TranslatedBody(TemplateBody, GenerationBody):
    """The fields that mean what they mean in chat; a subclass has those that it translates."""

    n: Literal[1] = 1
    echo: Literal[False] = False
    return_token_ids: Literal[False] = False
    keep: Literal[False] = False

    @abstractmethod
    def chat(self, sent: Fields) -> Fields:
        """The same request as the body of a chat. `sent` is this body as the client sent it.

        Raises InvalidField.
        """

    @classmethod
    def passed_on(cls, sent: Fields) -> Fields:
        """Chat's own fields as they were sent, and the usage that every answer shows."""
        own = cls.__mro__[: cls.__mro__.index(TranslatedBody)]
        translated = {name for each in own for name in each.__annotations__}
        passed = TranslatedBody.model_fields.keys() - translated
        usage = {"stream_options": {"include_usage": True}} if sent.get("stream") else {}
        return {name: value for name, value in sent.items() if name in passed} | usage

    def fitted(self, chat: ChatBody, room: int) -> ChatBody:
        """Chat's body, once it is known how many tokens of an answer there is room for."""
        return chat


class Lenient(BaseModel):
    """An object inside a body. Fields that it does not have are ignored: APIs add ever more."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def by_type(*types: str, default: str | None = None) -> Discriminator:
    """Tells objects apart by their `type`, whose tag is <type>."""
    return Discriminator(
        lambda value: f"<{value.get('type', default)}>" if isinstance(value, dict) else None,
        custom_error_type="type",
        custom_error_message=f"should be an object of a supported type: {', '.join(types)}",
    )


def refused(name: str, why: str, neutral: Sequence[object] = ()) -> BeforeValidator:
    """For a field that is known and cannot be granted."""

    def check(value: object) -> object:
        if value in neutral:
            return value
        raise UnsupportedField(f"{name} is not supported: {why}", name)

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class Translator:
    """An API. `names` are chat's names of what chat may refuse, and those that the API has."""

    body: type[TranslatedBody]
    names: Mapping[str, str]
    wire: Callable[[Any, ChatBody, str], Wire]  # body, chat's, and the model's name

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Tells what chat refuses by the names that the client sent."""
        try:
            yield
        except InvalidField as error:
            chat = error.param or ""
            own = self.names.get(chat.partition("[")[0].partition(".")[0])
            if own is None:
                raise
            message = error.message.replace(chat, own)
            raise type(error)(message, own, quotes=error.quotes) from None


@dataclass(slots=True)
class Part:
    """A stretch of an answer that is all of one kind, and begins with `first`."""

    kind: Kind
    index: int
    first: Delta  # a call's has its id and name
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments, JSON."""
        return "".join(self.pieces)


class PartsWire(ABC):
    """An answer of one choice as a list of parts that open, grow and close one after another."""

    ping = PING

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.finish = "stop"
        self.stop_reason: int | str | None = None

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str:
        return "".join(self._changes(piece))

    def gather(self, pieces: Sequence[tuple[Choice, Piece]]) -> None:
        """All parts at once, for an answer that is not streamed."""
        for _, piece in pieces:
            for _ in self._changes(piece):
                pass

    def _changes(self, piece: Piece) -> Iterator[str]:
        deltas = piece.deltas or [Delta(content=piece.text)] * bool(piece.text)
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
            if not self.parts and not deltas:
                deltas = [Delta()]  # an empty text: clients read the first part
        for delta in deltas:
            last = self.parts[-1] if self.parts else None
            if last is None or (last.kind, last.first.call) != (_kind(delta), delta.call):
                if last is not None:
                    yield self.closed(last)
                last = Part(_kind(delta), len(self.parts), delta)
                self.parts.append(last)
                yield self.opened(last)
            added = delta.content or delta.reasoning or delta.arguments
            if added:
                last.pieces.append(added)
                yield self.added(last, added)
        if piece.finish is not None:
            yield self.closed(self.parts[-1])

    @abstractmethod
    def opened(self, part: Part) -> str: ...
    @abstractmethod
    def added(self, part: Part, delta: str) -> str: ...
    @abstractmethod
    def closed(self, part: Part) -> str: ...


def _kind(delta: Delta) -> Kind:
    if delta.call is not None:
        return "call"
    return "reasoning" if delta.reasoning else "text"


def event(kind: str, fields: Mapping[str, object]) -> str:
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n"


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
