"""OpenAI's Responses as chat: items become messages. Nothing is stored between requests."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, StrictStr, Tag, model_validator

from ropewalk.server.errors import InvalidField, MissingField, UnsupportedField
from ropewalk.server.openai.schemas import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Count, text_or
from ropewalk.server.translators.base import (
    Fields,
    Lenient,
    TranslatedBody,
    by_type,
    chat_content,
    refused,
)

# Chat's name of what it may refuse, and the client's.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "tools": "tools",
    "tool_choice": "tool_choice",
}
MAX_METADATA = 16  # as OpenAI has it
_STATELESS = "this server keeps no responses; send the whole conversation as input"


class TextPart(Lenient):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


Content = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    text_or("text parts"),
]


class Message(Lenient):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCall(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class Reasoning(Lenient):
    """`content` has the reasoning itself, `summary` what other servers make of it."""

    type: Literal["reasoning"]
    content: list[TextPart] | None = None
    summary: list[TextPart] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


Item = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]
Input = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[
        list[Item], Field(min_length=1, max_length=2 * MAX_MESSAGES, fail_fast=True), Tag("<list>")
    ],
    text_or("items"),
]


def _missing(name: str) -> MissingField:
    return MissingField(f"{name} is missing; it is required", name)


def _without_scores(included: list[str]) -> list[str]:
    if "message.output_text.logprobs" in included:
        raise UnsupportedField("include asks for logprobs, which only a chat has", "include")
    return included


class TextConfig(Lenient):
    format: dict[str, Any] | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        form = self.format or {}
        if form.get("type") == "json_schema" and form.get("schema") is None:
            raise _missing("text.format.schema")
        return self


class ReasoningConfig(Lenient):
    effort: str | None = None
    summary: str | None = None


class Function(Lenient, extra="allow"):  # answers repeat it
    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None

    def chat(self) -> Fields:
        given = {name: each for name, each in self if name != "type" and each is not None}
        return {"type": "function", "function": given}


class OtherTool(Lenient, extra="allow"):
    """One that the server would run itself, and ignores."""

    type: str


def _tag_of_tool(value: object) -> str:
    other = isinstance(value, dict) and value.get("type", "function") != "function"
    return "<other>" if other else "<function>"


Tool = Annotated[
    Annotated[Function, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_tag_of_tool),
]


class NamedTool(Lenient, extra="allow"):
    name: str | None = None


class ChosenTool(Lenient, extra="allow"):  # answers repeat it
    """Names a function, or those of the tools that may be called."""

    type: str | None = None
    name: str | None = None
    mode: str = "auto"
    tools: list[NamedTool] = Field(default=[], max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "function" and self.name is None:
            raise _missing("tool_choice.name")
        return self

    def chat(self, functions: list[Function]) -> tuple[list[Function], str | Fields]:
        """The functions that are left, and chat's choice among them. Raises InvalidField."""
        match self.type:
            case "allowed_tools":
                allowed = {tool.name for tool in self.tools}
                return [each for each in functions if each.name in allowed], self.mode
            case "function":
                return functions, {"type": "function", "function": {"name": self.name}}
        raise InvalidField(
            "tool_choice should name a function: this server runs no tools of its own",
            "tool_choice",
        )


ToolChoice = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[ChosenTool, Tag("<object>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<object>"),
]


class ResponsesBody(TranslatedBody):
    """The body of /v1/responses. Tools of other types than function are ignored."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = None
    # This protocol's own tools, in place of a chat's, which mypy calls another type.
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)  # type: ignore[assignment]
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    metadata: dict[str, str] = Field(default={}, max_length=MAX_METADATA)
    previous_response_id: Annotated[Any, refused("previous_response_id", _STATELESS)] = None
    conversation: Annotated[Any, refused("conversation", _STATELESS)] = None
    background: Annotated[Any, refused("background", "answers are sent at once", (False,))] = None
    prompt: Annotated[Any, refused("prompt", "send its text as instructions or input")] = None
    top_logprobs: Annotated[Any, refused("top_logprobs", "only a chat has it", (0,))] = None
    # Without effect: they are about what is stored, or about tools that the server runs itself. A
    # conversation that does not fit is refused, with truncation "auto" too.
    include: Annotated[list[str], AfterValidator(_without_scores)] = Field(default=[])
    max_tool_calls: Any = None
    truncation: Literal["auto", "disabled"] = "disabled"
    client_metadata: Any = None
    context_management: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    def chat(self, sent: Fields) -> Fields:
        fields = {**self.passed_on(sent), "messages": self._messages(), **self._tools()}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text.verbosity is not None:
            fields["verbosity"] = self.text.verbosity
        if self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        return fields

    def _messages(self) -> list[Fields]:
        messages: list[Fields] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case Message(role="assistant"):
                    _turn(messages, "content", "tool_calls")["content"] = chat_content(item.content)
                case Message():
                    messages.append({"role": item.role, "content": chat_content(item.content)})
                case Reasoning() if item.text:
                    turn = _turn(messages, "reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = item.text
                case FunctionCall():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _turn(messages).setdefault("tool_calls", []).append(call)
                case FunctionCallOutput():
                    output = chat_content(item.output)
                    messages.append(
                        {"role": "tool", "tool_call_id": item.call_id, "content": output}
                    )
        for message in messages:
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return messages

    def _tools(self) -> Fields:
        functions = [tool for tool in self.tools if isinstance(tool, Function)]
        choice: str | Fields
        if isinstance(self.tool_choice, str):
            choice = self.tool_choice
        else:
            functions, choice = self.tool_choice.chat(functions)
        if not functions and choice in ("auto", "none"):
            return {}
        fields: Fields = {
            "tools": [each.chat() for each in functions],
            "tool_choice": choice,
        }
        if self.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        return fields


def _turn(messages: list[Fields], *later: str) -> Fields:
    """The assistant's message that an item belongs to: the last one, unless it has what is later.

    A message has reasoning, then content, then calls; items have them one by one.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in later):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _response_format(form: Fields) -> Fields:
    if form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
