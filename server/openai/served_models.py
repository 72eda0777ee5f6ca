"""Which models are served, under which names.

Plain data for the HTTP side. It knows no engine: tokens come from `AsyncEngine.generate`, which
takes the same names.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from ropewalk.model.chat.template import ChatTemplate
from ropewalk.model.config import USUAL, Embedding
from ropewalk.model.loading.checkpoints import InUse
from ropewalk.model.tokenizers.base import Tokenizer
from ropewalk.server.errors import ModelNotFound, quoted
from ropewalk.server.structured.compiler import Grammars
from ropewalk.server.tools.conventions import NO_TEMPLATE, Conventions


@dataclass(frozen=True, slots=True)
class EncoderDecoderTokens:
    """Special tokens around what an encoder-decoder reads and writes."""

    start: int  # the decoder's first, before every answer
    end: int  # the encoder's last, after every prompt given as text


@dataclass(frozen=True, slots=True)
class Served:
    """One model as its clients see it.

    `vocab_size` is the smaller of tokenizer and embedding rows: the bound for ids clients send.
    `created` is unix seconds. `details` is what /v1/models shows besides the usual fields.
    `max_context` bounds prompt and answer together, or each alone for an encoder-decoder.
    """

    name: str
    encoding: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    stop_ids: frozenset[int]
    vocab_size: int
    max_context: int
    created: int
    details: Mapping[str, object]
    encoder_decoder: EncoderDecoderTokens | None = None  # None: decoder only
    embedding: Embedding = USUAL
    hidden_size: int = 1  # numbers in an embedding
    aliases: tuple[str, ...] = ()  # further names that requests may give
    max_at_once: int | None = None  # answers that an idle engine takes; None: any number
    conventions: Conventions = NO_TEMPLATE  # of the chat template
    grammars: Grammars | None = None  # None: answers cannot be held to one
    in_use: InUse | None = None  # for what is computed beside the engine

    def room(self, num_prompt: int) -> int:
        """The most tokens that an answer to a prompt of that length can have."""
        if self.encoder_decoder is None:
            return self.max_context - num_prompt
        return self.max_context - 1  # the start token takes one place


class Models:
    """Names to models, in the order they were given. Names match exactly, never as a path."""

    def __init__(self, served: Iterable[Served]) -> None:
        """Raises ValueError for a name given twice."""
        self._served: dict[str, Served] = {}
        for one in served:
            if one.name in self._served:
                raise ValueError(f"two models are named {one.name!r}; give one another name")
            self._served[one.name] = one
        self.created = int(time.time())
        self.names = all_names((one.name, one.aliases) for one in self._served.values())

    def __iter__(self) -> Iterator[Served]:
        """Those that are loaded."""
        return iter(self._served.values())

    def name(self, given: str | None) -> str:
        """The model's own name; None means the only one. Raises ModelNotFound."""
        if given is None:
            own = set(self.names.values())
            if len(own) == 1:
                return own.pop()
            raise ModelNotFound(
                "model is missing, and this server has several; send a name from GET /v1/models",
                "model",
            )
        try:
            return self.names[given]
        except KeyError:
            raise ModelNotFound(
                f"model {quoted(given)} does not exist on this server; GET /v1/models lists its "
                "models",
                "model",
            ) from None

    def get(self, name: str) -> Served | None:
        """The model of that own name; None if it is not loaded."""
        return self._served.get(name)

    def status(self, name: str) -> Mapping[str, object]:
        """Of the model of that own name, as llama.cpp's server says it."""
        return {"value": "loaded"}

    async def hold(self, name: str, until: ExitStack) -> Served:
        """The model of that own name, which stays loaded until `until` is closed."""
        return self._served[name]

    async def close(self) -> None:
        """Nothing comes any more."""


def all_names(models: Iterable[tuple[str, Iterable[str]]]) -> Mapping[str, str]:
    """Every name that requests may give, to the model's own."""
    return {given: own for own, aliases in models for given in (own, *aliases)}
