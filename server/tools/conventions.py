"""What a chat template expects and writes, found out by rendering it.

A known template's format is data (formats.py). Of any other it is the difference between an answer
with calls and one with text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import takewhile
from typing import Any

from ropewalk.model.chat.template import ChatTemplate, ChatTemplateError
from ropewalk.server.tools.formats import HERMES, THINK, Form, Format, Written, known_format

Messages = Sequence[Mapping[str, object]]
Render = Callable[..., str]


class Told(StrEnum):
    """How a template takes tools."""

    TOOLS = "tools"  # as the variable of that name, as nearly all do
    XML_TOOLS = "xml_tools"  # likewise
    SYSTEM = "system"  # as the field `tools` of the system message, a text
    TEXT = "text"  # not at all: the system message has to describe them


class Calls(StrEnum):
    """How it takes `tool_calls` of earlier answers."""

    SEVERAL = "several"  # any number in a message
    SINGLE = "single"  # one in a message
    TEXT = "text"  # not at all: they have to be part of the content


class Results(StrEnum):
    """How it takes the results of calls."""

    ROLE = "role"  # as messages of the role "tool", as nearly all do
    RESPONSES = "responses"  # as `tool_responses` of the message with the calls
    USER = "user"  # not at all: the user has to tell them


@dataclass(frozen=True, slots=True)
class Conventions:
    """What one model's template expects and its answers contain."""

    format: Format = HERMES
    told: Told = Told.TEXT
    system: bool = True  # it takes system messages
    calls: Calls = Calls.TEXT
    results: Results = Results.USER
    arguments_as_text: bool = False  # of `tool_calls`: JSON, not objects
    short_ids: bool = False  # of calls: nine characters, as Mistral's demand
    documents: bool = False  # it reads the variable of that name
    thinking: bool = False  # it calls an answer's reasoning so


NO_TEMPLATE = Conventions()

_NAMES = ("first_sent", "second_sent")
_KEY, _VALUES = "argument_sent", ("value_one_sent", "value_two_sent")
_TEXT = "text_sent"
_USER = {"role": "user", "content": "Hello."}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {
                "type": "object",
                "properties": {_KEY: {"type": "string", "description": "An argument."}},
                "required": [_KEY],
            },
        },
    }
    for name in _NAMES
]


def conventions_of(template: ChatTemplate) -> Conventions:
    """Renders the template a few times, which takes milliseconds."""
    source = template.source
    render = partial(_rendered, template)
    told = next((way for way in _WAYS if _NAMES[0] in _WAYS[way](render)), Told.TEXT)
    tools = {told.value: _TOOLS} if told in (Told.TOOLS, Told.XML_TOOLS) else {}
    calls, as_text, shown = Calls.TEXT, False, ""
    if told is not Told.TEXT:
        calls, as_text, shown = _calls(render, tools)
    known = known_format(source)
    think = known.think if known else THINK if THINK[1] in source else None
    if told is Told.TEXT:
        format = replace(HERMES, think=think)
    else:
        format = known or (_different(render, shown, tools) if shown else None) or HERMES
        format = replace(format, think=think)
    return Conventions(
        format=format,
        told=told,
        system=_TEXT in render([{"role": "system", "content": _TEXT}, _USER]),
        calls=calls,
        results=Results.USER if told is Told.TEXT else _results(render, as_text, tools),
        arguments_as_text=as_text,
        short_ids=calls is not Calls.TEXT and not render([_USER, _answer(as_text, id="call_1")]),
        documents="documents" in source,
        thinking=re.search(r"""message\.thinking|['"]thinking['"]""", source) is not None,
    )


def _results(render: Render, as_text: bool, tools: Mapping[str, object]) -> Results:
    calls = _answer(as_text)
    responses = {"tool_responses": [{"name": _NAMES[0], "response": _TEXT}]}
    if _TEXT in render([_USER, {**calls, **responses}], **tools):
        return Results.RESPONSES
    result = {"role": "tool", "name": _NAMES[0], "tool_call_id": "123456780", "content": _TEXT}
    return Results.ROLE if _TEXT in render([_USER, calls, result], **tools) else Results.USER


def _rendered(template: ChatTemplate, messages: Messages, **variables: object) -> str:
    """Empty where the template refuses the messages."""
    try:
        return template.render(messages, add_generation_prompt=False, variables=variables)
    except ChatTemplateError:
        return ""


_WAYS: Mapping[Told, Callable[[Render], str]] = {
    Told.TOOLS: lambda render: render([_USER], tools=_TOOLS),
    Told.XML_TOOLS: lambda render: render([_USER], xml_tools=_TOOLS),
    Told.SYSTEM: lambda render: render(
        [{"role": "system", "content": "", "tools": str(_NAMES)}, _USER]
    ),
}


def _answer(as_text: bool, count: int = 1, *, id: str = "12345678") -> dict[str, Any]:
    calls = [
        {
            "id": f"{id}{index}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": f'{{"{_KEY}": "{value}"}}' if as_text else {_KEY: value},
            },
        }
        for index, (name, value) in enumerate(zip(_NAMES, _VALUES, strict=True))
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls[:count]}


def _calls(render: Render, tools: Mapping[str, object]) -> tuple[Calls, bool, str]:
    """How calls are written, whether their arguments are to be text, and two calls as written."""
    for calls, count in ((Calls.SEVERAL, 2), (Calls.SINGLE, 1)):
        for as_text in (False, True):
            shown = render([_USER, _answer(as_text, count)], **tools)
            # Written once, or as text in a text, where every quote has a backslash.
            wanted = (*_NAMES[:count], *_VALUES[:count])
            if all(part in shown for part in wanted) and '\\"' + _KEY not in shown:
                return calls, as_text, shown if count == 2 else ""
    return Calls.TEXT, False, ""


def _different(render: Render, shown: str, tools: Mapping[str, object]) -> Format | None:
    """The format of the two calls that are `shown`; None where their arguments are not JSON."""
    plain = render([_USER, {"role": "assistant", "content": _TEXT}], **tools)
    start, _, turn_end = plain.partition(_TEXT)
    start = _common_prefix(start, shown)
    place, found = len(start), []
    for name, value in zip(_NAMES, _VALUES, strict=True):
        call = re.compile(rf'{name}(.*?)(\{{\s*"{_KEY}"\s*:\s*"{value}"\s*\}})', re.DOTALL)
        match = call.search(shown, place)
        if match is None:
            return None
        found.append(match)
        place = match.end()
    one, two = found
    ahead = shown[len(start) : one.start()]  # begin and before
    amid = shown[one.end() : two.start()]  # after, between and before
    behind = shown[two.end() :].removesuffix(turn_end)  # after and end
    before = _common_prefix(ahead[::-1], amid[::-1])[::-1]
    amid = amid[: len(amid) - len(before)]
    after = _common_prefix(amid, behind)
    written = Written(
        before=before,
        middle=one.group(1),
        after=after,
        begin=ahead[: len(ahead) - len(before)],
        between=amid[len(after) :],
        end=behind[len(after) :],
    )
    json = re.search(r'\{\s*"\w+":\s*"$', ahead)
    head = (ahead[: json.start()] if json else ahead).strip(" \n[")
    each = (re.sub(r'\{\s*"\w+":\s*"$', "", before)).strip(" \n[") if json else before.strip()
    close = (after.lstrip(" \n}") if json else after).strip() or written.end.strip(" \n]")
    return Format(
        opens=tuple(dict.fromkeys(marker for marker in (head, each) if marker)),
        close=close,
        form=Form.JSON if json else Form.NAMED,
        written=written,
        bare=not head,
    )


def _common_prefix(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in same)
