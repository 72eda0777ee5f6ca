"""Bodies of /v1/positions: what to explain and to audit. As strict as those of schemas.py."""

from typing import Annotated

from pydantic import Discriminator, StrictStr, Tag

from ropewalk.server.openai.schemas import CountFromZero, Strict, TokenIds


def _form(value: object) -> str:
    return "text" if isinstance(value, str) else "ids"


Text = Annotated[
    Annotated[StrictStr, Tag("text")] | Annotated[TokenIds, Tag("ids")], Discriminator(_form)
]


class ExplainBody(Strict):
    """The scores of token number `query`, by default the last, in a layer."""

    model: str | None = None
    input: Text
    layer: CountFromZero = 0
    query: CountFromZero | None = None
    key: CountFromZero | None = None
    add_special_tokens: bool = True
