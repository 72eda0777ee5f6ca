"""Strict request bodies: types, ranges and fields that exclude each other.

Knows no model: server/openai/requests.py checks ids against the vocabulary and lengths against the
context. A rejection names the field and never repeats what was sent.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictStr,
    Tag,
    model_validator,
)

from ropewalk.server.errors import InvalidField, MissingField, UnsupportedField
from ropewalk.server.structured.fields import StructuredFields, asked_form
from ropewalk.server.structured.grammar import Grammar

MAX_PROMPTS = 1024
MAX_STOP_IDS = 128
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message
MAX_TOOLS = 256
MAX_CALLS = 256  # of one answer
FORMS = frozenset(StructuredFields.model_fields)
AS_MANY_AS_FIT = -1  # tokens of an answer, as llama.cpp writes it


def _whole(value: Any) -> Any:
    """16.0 as 16: languages with one type of number write either."""
    return int(value) if type(value) is float and value.is_integer() else value


_FAIL_FAST = Field(fail_fast=True)
_WHOLE = BeforeValidator(_whole)
# Below 2**31 here; below the vocabulary once the model is known.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), _FAIL_FAST]
Count = Annotated[int, Field(ge=1, lt=2**31), _WHOLE]
CountFromZero = Annotated[int, Field(ge=0, lt=2**31), _WHOLE]
MaxTokens = Annotated[int, Field(ge=AS_MANY_AS_FIT, lt=2**31), _WHOLE]
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE]
SequenceId = Annotated[str, Field(pattern="^seq-[0-9a-f]{32}$")]
CacheSalt = Annotated[str, Field(pattern="^[A-Za-z0-9._-]{1,128}$")]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _WHOLE]


def _prompt_form(value: Any) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, str):
        return "<text>" if first is value else "<texts>"
    if first is not value and isinstance(first, list):
        return "<id lists>"
    # An empty list has no form of its own: it fails as a list of ids, which may not be empty.
    return "<ids>" if isinstance(value, list) and type(first) in (int, list) else None


Prompt = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[
        list[StrictStr], Field(min_length=1, max_length=MAX_PROMPTS), _FAIL_FAST, Tag("<texts>")
    ]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[
        list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), _FAIL_FAST, Tag("<id lists>")
    ],
    Discriminator(
        _prompt_form,
        custom_error_type="form",
        custom_error_message="should be a text, a list of texts, a list of token ids or a list of "
        "such lists",
    ),
]


def several(prompt: Any) -> Sequence[str | list[int]]:
    """One of the Prompt's forms as a list of prompts."""
    alone = isinstance(prompt, str) or isinstance(prompt[0], int)
    found: Sequence[str | list[int]] = [prompt] if alone else prompt
    return found


def _stop_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("should be a string or a list of strings")
    # An empty string, which some clients always send, would end every answer at once.
    return [stop for stop in ([value] if isinstance(value, str) else value) if stop != ""]


def _seed(value: int) -> int | None:
    """-1 means none, as in other servers."""
    return None if value == -1 else value


def _bias_keys(value: Any) -> Any:
    """{"123": 1.0} to {123: 1.0}; keys are decimal as written by str(int)."""
    if not isinstance(value, dict):
        raise ValueError("should map token ids to biases")
    if len(value) > MAX_BIASES:
        raise ValueError(f"should have at most {MAX_BIASES} entries")
    for key in value:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            raise ValueError("should have token ids in plain decimal digits as keys")
    return {int(key): bias for key, bias in value.items()}


_StopForms = (
    Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
    | Annotated[
        list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOPS)
    ]
)
_BiasForms = Annotated[
    dict[
        Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
]
Stops = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]],
    Field(max_length=MAX_STOPS),
    _FAIL_FAST,
    BeforeValidator(_stop_list, json_schema_input_type=_StopForms),
]
Biases = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_bias_keys, json_schema_input_type=_BiasForms),
]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(StructuredFields, Strict):
    """What completions and chat share."""

    model: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    min_tokens: CountFromZero = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0  # 0: the most likely token
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _WHOLE] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), _FAIL_FAST] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE, AfterValidator(_seed)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE] = 1
    logit_bias: Biases = {}
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    overflow: Literal["refuse", "shift", "slide"] = "refuse"
    cache_salt: CacheSalt | None = None
    keep: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def wanted_tokens(self) -> int | None:
        """None: the endpoint's default; AS_MANY_AS_FIT; 0: the prompt's scores alone."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must satisfy, where the body asks for a form. Raises InvalidField."""
        return None if FORMS.isdisjoint(self.model_fields_set) else asked_form(self)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        _ = self.grammar  # which is at most one
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidField(
                "max_tokens and max_completion_tokens differ; send one of them",
                "max_completion_tokens",
            )
        wanted = self.wanted_tokens
        if wanted is not None and AS_MANY_AS_FIT < wanted < self.min_tokens:
            raise InvalidField(
                f"min_tokens ({self.min_tokens}) should be at most max_tokens ({wanted})",
                "min_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidField("stream_options needs stream to be true", "stream_options")
        if self.keep and (self.n > 1 or wanted == 0):
            raise InvalidField(
                "keep is possible for one answer of at least one token; leave n out, and request "
                "1 or more",
                "keep",
            )
        if wanted == 0 and not self.echo:
            name = "max_completion_tokens" if self.max_tokens is None else "max_tokens"
            raise InvalidField(
                f"{name} should be greater than or equal to 1; 0 is possible only with echo, to "
                "score a prompt",
                name,
            )
        return self


class CompletionBody(GenerationBody):
    prompt: Prompt
    logprobs: Logprobs | None = None
    add_special_tokens: bool = True
    sequence: SequenceId | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Prompts to complete independently."""
        return several(self.prompt)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _check_fan_out(self) -> Self:
        count = len(self.prompts)
        if count * self.n > MAX_PROMPTS:
            raise InvalidField(
                f"prompt asks for {count * self.n} completions ({count} prompts × n {self.n}); "
                f"send at most {MAX_PROMPTS} at once",
                "prompt",
            )
        for name in ("sequence", "keep"):
            if getattr(self, name) and count > 1:
                raise InvalidField(f"{name} is possible with one prompt; send one", name)
        for name in ("echo", "cache_salt"):
            if self.sequence is not None and getattr(self, name):
                raise UnsupportedField(
                    f"{name} cannot be combined with sequence; leave one of them out", name
                )
        return self


class EmbeddingBody(Strict):
    input: Prompt
    model: str | None = None
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["last", "mean"] | None = None
    add_special_tokens: bool = True
    priority: Priority = 0
    cache_salt: CacheSalt | None = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """Texts to embed independently."""
        return several(self.input)


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # prefixes are cached without being marked


def text_or(things: str) -> Discriminator:
    """Tells the tags <text> and <list> apart; the refusal names the things of the list."""

    def form(value: object) -> str | None:
        return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None

    return Discriminator(
        form,
        custom_error_type="form",
        custom_error_message=f"should be text or a list of {things}",
    )


Content = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[
        list[TextPart], Field(min_length=1, max_length=MAX_PARTS), _FAIL_FAST, Tag("<list>")
    ],
    text_or("text parts"),
]


# OpenAI's are 64 letters, digits, _ and -; those of MCP servers may have these characters too.
FunctionName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9_.:/-]{1,128}\z")]


class CalledFunction(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = ""
    parsed_arguments: Any = None  # the openai package's own reading of them


class ToolCall(Strict):
    """One that an answer had, as clients send it back."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a streamed one
    provider_specific_fields: Any = None  # as in a message


def text_of(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(Strict):
    """What much of the answer is expected to be, as of a text that is to be edited."""

    type: Literal["content"]
    content: Content


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    type: Literal["text"] = "text"  # lm-eval adds it to every message
    name: Annotated[str, Field(max_length=128)] | None = None
    id: str | None = None
    cache_control: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    parsed: Any = None  # the openai package's own reading of the content
    provider_specific_fields: Any = None  # litellm's own notes on an answer

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it, with OpenAI's newer role "developer" as "system"."""
        content = text_of(self.content)
        role = "system" if self.role == "developer" else self.role
        more = self.model_dump(include=_SHOWN, exclude_none=True)
        thought = self.reasoning_content or self.reasoning
        if thought is not None:  # templates read it by either name
            more |= {"reasoning": thought, "reasoning_content": thought}
        return {"role": role, "content": content, **more}


_SHOWN: Any = {
    **dict.fromkeys(("name", "reasoning", "reasoning_content", "tool_call_id"), True),
    "tool_calls": {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}},
}


def _check_calls(messages: list[Message]) -> list[Message]:
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role == "tool" and message.tool_call_id is None:
            raise MissingField(
                f"{path}.tool_call_id is missing; it is required", f"{path}.tool_call_id"
            )
        for name, role in (("tool_call_id", "tool"), ("tool_calls", "assistant")):
            if getattr(message, name) is not None and message.role != role:
                raise InvalidField(
                    f"{path}.{name} is only for messages of the role {role}; leave it out",
                    f"{path}.{name}",
                )
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES),
    _FAIL_FAST,
    AfterValidator(_check_calls),
]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Their schema. A function without parameters has none."""
        return _NO_ARGUMENTS if self.parameters is None else self.parameters


_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it: some fail where a description or parameters are missing."""
        function = self.function
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.arguments,
            },
        }


class FunctionChoice(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionChoice


class Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    """As if there were no others."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _tool_choice_form(value: Any) -> str:
    if isinstance(value, str):
        return "<word>"
    is_allowed = isinstance(value, dict) and value.get("type") == "allowed_tools"
    return "<allowed>" if is_allowed else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(_tool_choice_form),
]


# What the server gives a chat template, and what it does not let it have.
_TAKEN = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
    "additional_special_tokens",
)


def _free_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in _TAKEN:
        if name in value:
            raise ValueError(f"should not have {name}, which is the server's to set")
    return value


class TemplateBody(Strict):
    """Variables for the chat template. One that the template does not read changes nothing."""

    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_free_names)] = {}
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    documents: list[dict[str, Any]] = []

    @property
    def told_tools(self) -> Sequence[Tool]:
        """Those that the model is told of."""
        return self.tools

    @property
    def variables(self) -> Mapping[str, object]:
        return {**self.chat_template_kwargs, **self._own_variables}

    @property
    def _own_variables(self) -> Mapping[str, object]:
        own = {"enable_thinking", "reasoning_effort", "verbosity"}
        return self.model_dump(include=own, exclude_none=True)

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        for name, value in self._own_variables.items():
            if self.chat_template_kwargs.get(name, value) != value:
                raise InvalidField(
                    f"{name} and chat_template_kwargs.{name} differ; send one of them", name
                )
        return self


class ChatBody(TemplateBody, GenerationBody):
    messages: Messages
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    echo: Literal[False] = False
    add_special_tokens: bool = False
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None

    @property
    def told_tools(self) -> Sequence[Tool]:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return [tool for tool in self.tools if tool.function.name in self._chosen_tools]
        return () if choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice not in ("none", "auto")

    @property
    def named_tool(self) -> str | None:
        """The only function that may and must be called."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else None

    @property
    def _chosen_tools(self) -> frozenset[str]:
        """Functions that `tool_choice` names."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return frozenset(tool.function.name for tool in choice.allowed_tools.tools)
        return frozenset((choice.function.name,)) if isinstance(choice, NamedTool) else frozenset()

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidField("tools has two functions of one name; rename one", "tools")
        if self.must_call and not names:
            raise InvalidField("tool_choice asks for a call, but there are no tools", "tool_choice")
        if not self._chosen_tools <= set(names):
            raise InvalidField("tool_choice names a function that tools lacks", "tool_choice")
        return self


class TokenizeBody(TemplateBody):
    """One of `prompt`, `text` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], _FAIL_FAST]


class CachePlanBody(Strict):
    """An operation of cache/types.py on `tokens` tokens. Its fields: FIELDS in app/cache.py."""

    model: str | None = None
    operation: Literal["append", "fork", "truncate", "evict_keep", "evict_renumber", "move_span"]
    tokens: Count
    first: CountFromZero | None = None
    count: Count | None = None
    offset: Count | None = None


class FlushBody(Strict):
    """Whose cached prefixes to forget; None: all models'."""

    model: str | None = None


class ModelBody(Strict):
    """Which model to load or to unload."""

    model: str | None = None


BODIES: tuple[type[BaseModel], ...] = (
    CompletionBody,
    ChatBody,
    EmbeddingBody,
    TokenizeBody,
    DetokenizeBody,
    CachePlanBody,
    FlushBody,
    ModelBody,
)
AnyBody = TypeVar("AnyBody", bound=BaseModel)
