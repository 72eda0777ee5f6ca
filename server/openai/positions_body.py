"""Bodies of /v1/positions: what to explain and to audit. As strict as those of schemas.py."""

from typing import Annotated

from pydantic import Discriminator, Field, StrictStr, Tag

from ropewalk.server.openai.schemas import Count, CountFromZero, Strict, TokenIds

MOST_APPENDED = 128


def _form(value: object) -> str:
    return "<text>" if isinstance(value, str) else "<ids>"


def _more_form(value: object) -> str:
    return "<count>" if isinstance(value, int | float) else _form(value)


Text = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")], Discriminator(_form)
]

More = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Count, Field(le=MOST_APPENDED), Tag("<count>")],
    Discriminator(_more_form),
]


class ExplainBody(Strict):
    """The scores of token number `query`, by default the last, in a layer."""

    model: str | None = None
    input: Text
    layer: CountFromZero = 0
    query: CountFromZero | None = None
    key: CountFromZero | None = None
    add_special_tokens: bool = True


class AuditBody(Strict):
    """Tokens appended to a prompt: some, or a number of them, which repeat the prompt's."""

    model: str | None = None
    arm: str = "own"
    prompt: Text
    append: More
    layers: Count | None = None
    steps: Count | None = None
    trained_length: Count | None = None
    add_special_tokens: bool = True


BODIES = (ExplainBody, AuditBody)
