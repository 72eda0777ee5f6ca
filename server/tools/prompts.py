"""Tools, calls and results in the messages that a chat template gets."""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from ropewalk.server.tools.conventions import Calls, Conventions, Results, Told

Message = dict[str, Any]

# For templates that know no tools. Qwen 2 and 3, SmolLM2 and Hermes were trained with such words.
_TEXT = """\
You can call functions. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>
You then get its result between <tool_response> and </tool_response>. When no function helps, \
answer in words."""


def template_input(
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    conventions: Conventions,
) -> tuple[list[Message], dict[str, object]]:
    """Messages as the template takes them, and the variables that tell it of the tools.

    messages, tools: in OpenAI's form. An empty list of tools tells it of none.
    """
    given = list(_named(messages))
    if conventions.short_ids:
        given = [_with_short_ids(message) for message in given]
    if conventions.calls is Calls.SINGLE:
        given = list(_one_by_one(given))
    if conventions.calls is not Calls.TEXT:
        given = [_with_arguments(message, conventions) for message in given]
    else:
        given = [_in_words(message, conventions) for message in given]
    if conventions.results is Results.USER:
        given = list(_results_as_user(given))
    elif conventions.results is Results.RESPONSES:
        given = list(_results_as_responses(given))
    if conventions.thinking:
        given = [
            {**message, "thinking": thought}
            if (thought := message.get("reasoning_content") or message.get("reasoning"))
            else message
            for message in given
        ]
    variables: dict[str, object] = {}
    match conventions.told:
        case _ if not tools:
            pass
        case Told.TOOLS | Told.XML_TOOLS:
            variables[conventions.told.value] = tools
        case Told.SYSTEM:
            given = _with_system(given, "", tools=_compact([tool["function"] for tool in tools]))
        case Told.TEXT:
            lines = "\n".join(_compact(tool["function"]) for tool in tools)
            given = _instructed(given, _TEXT.format(tools=lines), conventions)
    return given, variables


def _named(messages: Iterable[Mapping[str, Any]]) -> Iterable[Message]:
    """Each result with the name of its function, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        yield {"name": name, **message} if name else dict(message)


def _with_short_ids(message: Message) -> Message:
    if "tool_calls" in message:
        calls = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    id = message.get("tool_call_id")
    return message if id is None else {**message, "tool_call_id": _short(id)}


def _short(id: str) -> str:
    """The same for the same id; those that this server has given are short."""
    return id if len(id) == 9 and id.isalnum() else blake2b(id.encode()).hexdigest()[:9]


def _one_by_one(messages: Sequence[Message]) -> Iterable[Message]:
    """Each call in a message of its own, and its result behind it."""
    moved: set[int] = set()
    for place, message in enumerate(messages):
        if len(message.get("tool_calls", ())) < 2:
            if place not in moved:
                yield message
            continue
        after = range(place + 1, len(messages))
        results = list(takewhile(lambda at: messages[at]["role"] == "tool", after))
        for index, call in enumerate(message["tool_calls"]):
            yield {**message, "content": "" if index else message["content"], "tool_calls": [call]}
            for at in results:
                if messages[at].get("tool_call_id") == call["id"] and at not in moved:
                    moved.add(at)
                    yield messages[at]


def _with_arguments(message: Message, conventions: Conventions) -> Message:
    """Arguments as objects, unless the template wants the text that clients send."""
    if "tool_calls" not in message or conventions.arguments_as_text:
        return message
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": _read(call["function"]["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _read(arguments: str) -> object:
    """What is not an object, as small models write at times, stays as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _in_words(message: Message, conventions: Conventions) -> Message:
    """Calls as text, for a template that does not write them."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"] or "{}")
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    text = conventions.format.written.calls(calls)
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def _results_as_user(messages: Iterable[Message]) -> Iterable[Message]:
    """Results as messages of the user, together with what the user says next."""
    held: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            held.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if held and message["role"] == "user":
            message = {**message, "content": "\n".join((*held, message["content"]))}
        elif held:
            yield {"role": "user", "content": "\n".join(held)}
        held = []
        yield message
    if held:
        yield {"role": "user", "content": "\n".join(held)}


def _results_as_responses(messages: Iterable[Message]) -> Iterable[Message]:
    """Results in the message with their calls."""
    calling: Message | None = None
    for message in messages:
        if calling is not None and message["role"] == "tool":
            response = {"name": message.get("name", ""), "response": message["content"]}
            responses = [*calling.get("tool_responses", ()), response]
            calling = {**calling, "tool_responses": responses}
            continue
        if calling is not None:
            yield calling
        calling = message
    if calling is not None:
        yield calling


def _instructed(messages: list[Message], text: str, conventions: Conventions) -> list[Message]:
    """The text in the system message, or in the user's first where the template takes no other."""
    if conventions.system:
        return _with_system(messages, text)
    for index, message in enumerate(messages):
        if message["role"] == "user":
            told = {**message, "content": f"{text}\n\n{message['content']}"}
            return [*messages[:index], told, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _with_system(messages: list[Message], text: str, **fields: object) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first, rest = messages[0], messages[1:]
    else:
        first, rest = {"role": "system", "content": ""}, messages
    content = "\n\n".join(part for part in (first["content"], text) if part)
    return [{**first, "content": content, **fields}, *rest]


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
