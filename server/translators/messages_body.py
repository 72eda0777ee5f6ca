"""Anthropic's Messages as chat: content blocks become chat's messages, tools and choices."""

from collections.abc import Mapping
from json import dumps
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BeforeValidator, Discriminator, Field, StrictStr, Tag

from ropewalk.server.errors import InvalidField, ThreadsUnsupported
from ropewalk.server.openai.schemas import (
    AS_MANY_AS_FIT,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChatBody,
    Count,
    Stops,
    text_or,
)
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
    "messages": "messages",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tools": "tools",
    "tool_choice": "tool_choice",
}


class Text(Lenient):
    type: Literal["text"]
    text: str


Texts = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[Text], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    text_or("text blocks"),
]


class Thinking(Lenient):
    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Lenient):
    """Of another server, which alone can read it."""

    type: Literal["redacted_thinking"]


class ToolUse(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_NONE_IS_EMPTY = BeforeValidator(lambda content: "" if content is None else content)


class ToolResult(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Texts, _NONE_IS_EMPTY] = ""


Block = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Thinking, Tag("<thinking>")]
    | Annotated[RedactedThinking, Tag("<redacted_thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")],
    by_type("text", "thinking", "tool_use", "tool_result"),
]
Blocks = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    text_or("content blocks"),
]


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    def chat(self) -> list[Fields]:
        """Chat's messages for this one: results of tools first, each in its own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[Fields] = []
        texts, thoughts, calls = [], [], []
        for block in self.content:
            match block:
                case Text():
                    texts.append({"type": "text", "text": block.text})
                case Thinking():
                    thoughts.append(block.thinking)
                case ToolUse():
                    # Not escaped: the model reads them as it wrote them.
                    arguments = dumps(block.input, ensure_ascii=False)
                    function = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResult():
                    content = chat_content(block.content)
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": block.tool_use_id,
                            "content": content or "",
                        }
                    )
        own: Fields = {"role": self.role}
        if thoughts:
            own["reasoning_content"] = "".join(thoughts)
        if texts:
            own["content"] = texts
        if calls:
            own["tool_calls"] = calls
        elif not texts and not messages:
            own["content"] = ""
        return [*messages, own] if len(own) > 1 else messages


class OwnTool(Lenient):
    """One of Anthropic's, which is ignored."""

    name: str


class Tool(Lenient):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def chat(self) -> Fields:
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": given | {"parameters": self.input_schema}}


def _tag_of_tool(value: object) -> str:
    if not isinstance(value, dict) or "input_schema" in value:
        return "<custom>"
    return "<custom>" if value.get("type") in (None, "custom") else "<own>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<custom>")] | Annotated[OwnTool, Tag("<own>")],
    Discriminator(_tag_of_tool),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def chat(self) -> Fields:
        named = {"type": "function", "function": {"name": self.name}}
        choice = {"any": "required", "tool": named}.get(self.type, self.type)
        single = {"parallel_tool_calls": False} if self.disable_parallel_tool_use else {}
        return {"tool_choice": choice, **single}


class ThinkingConfig(Lenient):
    """Whether to think is the chat template's affair; how long has no effect."""

    type: str

    @property
    def enabled(self) -> bool:
        return self.type != "disabled"


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    effort: str | None = None
    format: OutputFormat | None = None


def _refuse_threads(value: object) -> NoReturn:
    """Raises ThreadsUnsupported."""
    raise ThreadsUnsupported(
        "thread is not supported: send the whole conversation without it", "thread"
    )


class CountBody(TranslatedBody):
    """The body of /v1/messages/count_tokens, and of /v1/messages without its limit."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    system: Texts = ""
    stop_sequences: Stops = Field(default=[])
    # This protocol's own, in place of a chat's, which mypy calls another type.
    tools: Tools = Field(default=[])  # type: ignore[assignment]
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingConfig = ThinkingConfig(type="disabled")
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None
    container: Annotated[Any, refused("container", "this server runs no code; leave it out")] = None
    thread: Annotated[Any, BeforeValidator(_refuse_threads)] = None
    mcp_servers: Annotated[Any, refused("mcp_servers", "give its tools as tools", ([],))] = None
    # Without effect: they are about Anthropic's own machines, caches and accounts.
    metadata: Any = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    def chat(self, sent: Fields) -> Fields:
        if self.messages[-1].role == "assistant":
            raise InvalidField(
                "messages end with the assistant's, which is not continued; end with the user's",
                "messages",
            )
        fields = self.passed_on(sent)
        if "thinking" in sent or "enable_thinking" not in self.chat_template_kwargs:
            fields = {"enable_thinking": self.thinking.enabled, **fields}
        system = chat_content(self.system)
        fields["messages"] = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            fields["messages"] += message.chat()
        if self.max_tokens is not None:
            fields["max_completion_tokens"] = self.max_tokens
        if self.stop_sequences:
            fields["stop"] = [*self.stop, *self.stop_sequences]
        tools = [tool.chat() for tool in self.tools if isinstance(tool, Tool)]
        if tools or self.tool_choice.type in ("any", "tool"):
            fields |= {"tools": tools, **self.tool_choice.chat()}
        if self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        form = self.output_config.format or self.output_format
        if form is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesBody(CountBody):
    max_tokens: Count

    def fitted(self, chat: ChatBody, room: int) -> ChatBody:
        """A client has to send a limit, and cannot know how much room there is."""
        if self.max_tokens <= room or self.overflow != "refuse":
            return chat
        return chat.model_copy(update={"max_completion_tokens": AS_MANY_AS_FIT})
