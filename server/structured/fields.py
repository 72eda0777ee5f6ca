"""The fields by which a body asks for an answer of a certain form: OpenAI's and vLLM's."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ropewalk.server.errors import InvalidField, MissingField
from ropewalk.server.long_work import longer
from ropewalk.server.structured.grammar import MAX_TEXT, Grammar, Kind

MAX_CHOICES = 4096


def _schema_text(value: Any) -> Any:
    """A JSON schema as text; one that is text already is read when it is compiled."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | bool):
        raise ValueError("should be a JSON schema")
    _refuse_long(value)
    return json.dumps(value, ensure_ascii=False)


def _choice_text(value: Any) -> Any:
    if not (
        isinstance(value, list)
        and 0 < len(value) <= MAX_CHOICES
        and all(isinstance(each, str) and each for each in value)
    ):
        raise ValueError(f"should be a list of 1 to {MAX_CHOICES} texts, none of them empty")
    _refuse_long(value)
    return json.dumps(value, ensure_ascii=False)


def _refuse_long(value: Any) -> None:
    """Before a single long call, which would hold up the event loop, writes it."""
    if longer(value, MAX_TEXT):
        raise ValueError(f"should have at most {MAX_TEXT} characters")


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
# What clients send, which is told apart from the text that is made of it.
_SCHEMA = {
    "anyOf": [
        {"type": "object"},
        {"type": "boolean"},
        {"type": "string", "minLength": 1, "maxLength": MAX_TEXT},
    ]
}
_CHOICES = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "maxItems": MAX_CHOICES,
}
Schema = Annotated[Text, BeforeValidator(_schema_text), WithJsonSchema(_SCHEMA)]
Choices = Annotated[Text, BeforeValidator(_choice_text), WithJsonSchema(_CHOICES)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NamedSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None  # all are


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        name = "response_format.json_schema"
        if self.type == "json_schema" and self.json_schema is None:
            raise MissingField(f"{name} is missing; it is required with this type", name)
        if self.type != "json_schema" and self.json_schema is not None:
            raise InvalidField(f"{name} needs the type json_schema; leave it out", name)
        return self


class StructuredOutputs(_Strict):
    """As vLLM has it."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # where a schema does not speak of them
    disable_fallback: bool | None = None  # there is none
    structural_tag: None = None


class StructuredFields(BaseModel):
    """At most one of them is given; what it asks for is `asked_form` of the body."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None


def asked_form(body: StructuredFields) -> Grammar | None:
    """Raises InvalidField where a body asks for two."""
    first, *others = [*_grammars(body), None]
    if first is not None and (other := others[0]) is not None:
        raise InvalidField(
            f"{first.param} and {other.param} both say what the answer must look like; send "
            "one of them",
            other.param,
        )
    return first


def _grammars(body: StructuredFields) -> Iterator[Grammar]:
    form, vllm = body.response_format, body.structured_outputs or StructuredOutputs()
    whitespace = "" if vllm.disable_any_whitespace else vllm.whitespace_pattern
    if whitespace is None:
        whitespace = body.guided_whitespace_pattern
    if form is not None and form.json_schema is not None:
        yield Grammar(Kind.JSON_SCHEMA, form.json_schema.schema_, whitespace)
    elif form is not None and form.type == "json_object":
        yield Grammar(Kind.JSON_OBJECT, "", whitespace)
    yield from _given(
        "guided_",
        whitespace,
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    if vllm.json_object:
        yield Grammar(Kind.JSON_OBJECT, "", whitespace, "structured_outputs.json_object")
    yield from _given(
        "structured_outputs.",
        whitespace,
        json=vllm.json_,
        regex=vllm.regex,
        choice=vllm.choice,
        grammar=vllm.grammar,
    )


def _given(prefix: str, whitespace: str | None, **texts: str | None) -> Iterator[Grammar]:
    for name, text in texts.items():
        if text is not None:
            yield Grammar(_kind(name, text), text, whitespace, prefix + name)


def _kind(name: str, text: str) -> Kind:
    if name == "grammar":
        return Kind.GBNF if "::=" in text else Kind.LARK
    return {"json": Kind.JSON_SCHEMA, "regex": Kind.REGEX, "choice": Kind.CHOICE}[name]
