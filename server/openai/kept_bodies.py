"""Bodies of the routes for kept sequences, which few servers are asked for."""

from typing import Annotated, Literal, Self

from pydantic import StrictStr, Tag, model_validator

from ropewalk.server.errors import InvalidField, MissingField
from ropewalk.server.openai.schemas import (
    CacheSalt,
    Count,
    CountFromZero,
    Priority,
    SequenceId,
    Strict,
    TokenIds,
    text_or,
)

OnePrompt = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[TokenIds, Tag("<list>")], text_or("token ids")
]


class KeepBody(Strict):
    """A prompt whose entries are to stay in the cache; with `parent` it continues that sequence."""

    model: str | None = None
    prompt: OnePrompt
    parent: SequenceId | None = None
    add_special_tokens: bool = True
    cache_salt: CacheSalt | None = None
    priority: Priority = 0


class OperationBody(Strict):
    """An operation of cache/types.py on a kept sequence, in tokens."""

    operation: Literal["append", "fork", "truncate", "evict_keep", "evict_renumber", "move_span"]
    first: CountFromZero | None = None
    count: Count | None = None
    onto: SequenceId | None = None
    prompt: OnePrompt | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        appends, moves = self.operation == "append", self.operation == "move_span"
        if moves and self.onto is None:
            raise MissingField("onto is missing; move_span needs it", "onto")
        if appends and (self.prompt is None) == (self.count is None):
            raise InvalidField("append needs a prompt or a count; send one of them", "prompt")
        for name, needed in (("onto", moves), ("prompt", appends), ("first", not appends)):
            if getattr(self, name) is not None and not needed:
                raise InvalidField(f"{name} does not apply to {self.operation}; leave it out", name)
        return self


BODIES = (KeepBody, OperationBody)
