"""What is found out about a chat template, and what it is then given."""

import json
from functools import cache

import pytest

from ropewalk.model.chat.template import ChatTemplate
from ropewalk.server.tools.conventions import Calls, Conventions, Results, Told, conventions_of
from ropewalk.server.tools.formats import HERMES, THINK, Form, Format, known_format
from ropewalk.server.tools.parser import Parser
from ropewalk.server.tools.prompts import template_input
from tests.server.tools import families
from tests.server.tools.families import CITY, TOOLS, WEATHER, joined

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
XML_TOOLS = families.HERMES.replace("tools", "xml_tools")
ALTERNATING = (
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
# Of nobody: its formats have to be found out.
SECTIONS = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}<calls>{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }}|{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}</calls>{% endif %}</end>{% endfor %}"
)
LISTED = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}[CALLS] [{% for c in m.tool_calls %}"
    '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}][/CALLS]{% endif %}</end>{% endfor %}"
)
BARE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "{% endfor %}</end>{% endfor %}"
)


@cache
def learned(source: str) -> tuple[ChatTemplate, Conventions]:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template, conventions_of(template)


@pytest.mark.parametrize(
    ("source", "told", "calls", "as_text", "results"),
    [
        (families.HERMES, Told.TOOLS, Calls.SEVERAL, False, Results.ROLE),
        (XML_TOOLS, Told.XML_TOOLS, Calls.SEVERAL, False, Results.ROLE),
        (families.MISTRAL, Told.TOOLS, Calls.SEVERAL, False, Results.ROLE),
        (families.DEEPSEEK, Told.TOOLS, Calls.SEVERAL, True, Results.ROLE),
        (families.GEMMA4, Told.TOOLS, Calls.SEVERAL, False, Results.RESPONSES),
        (families.PHI4, Told.SYSTEM, Calls.TEXT, False, Results.ROLE),
        (families.LLAMA3, Told.TOOLS, Calls.SINGLE, False, Results.ROLE),
        (families.HARMONY, Told.TOOLS, Calls.SINGLE, False, Results.ROLE),
        (CHATML, Told.TEXT, Calls.TEXT, False, Results.USER),
        (ALTERNATING, Told.TEXT, Calls.TEXT, False, Results.USER),
    ],
)
def test_what_a_template_takes(source, told, calls, as_text, results) -> None:
    found = learned(source)[1]
    assert (found.told, found.calls, found.results) == (told, calls, results)
    assert found.arguments_as_text is as_text


def test_a_known_template_has_its_format_and_one_without_tools_the_usual_one() -> None:
    assert learned(families.MISTRAL)[1].format == known_format(families.MISTRAL)
    assert learned(CHATML)[1].format == HERMES
    assert learned(CHATML + "{# </think> #}")[1].format == Format(think=THINK)
    assert not learned(ALTERNATING)[1].system and learned(CHATML)[1].system


@pytest.mark.parametrize(
    ("source", "form", "written"),
    [
        (SECTIONS, Form.NAMED, f"<calls><call>weather|{CITY}</call><call>now|{{}}</call></calls>"),
        (
            LISTED,
            Form.JSON,
            f'[CALLS] [{{"tool_name": "weather", "parameters": {CITY}}}, '
            '{"tool_name": "now", "parameters": {}}][/CALLS]',
        ),
        (
            BARE,
            Form.JSON,
            f'{{"name": "weather", "arguments": {CITY}}}\n{{"name": "now", "arguments": {{}}}}\n',
        ),
    ],
)
def test_an_unknown_format_is_found_by_rendering(source, form, written) -> None:
    format = learned(source)[1].format
    assert format.form is form
    calls = [("weather", CITY), ("now", "{}")]
    assert format.written.calls(calls).strip() == written.strip()
    parser = Parser(format, TOOLS)
    assert joined(parser.push(written) + parser.finish()).calls == calls


ID = "123456789"
CALL = {"id": ID, "type": "function", "function": {"name": "weather", "arguments": CITY}}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": ID, "content": "sunny"},
    {"role": "user", "content": "Sure?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER},
}


def prompt(source: str, messages=ASKED, tools=(TOOL,)) -> str:
    template, conventions = learned(source)
    given, variables = template_input(messages, list(tools), conventions)
    return template.render(given, add_generation_prompt=True, variables=variables)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (
            families.HERMES,
            [
                json.dumps(TOOL),
                f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}',
                "tool\nsunny",
            ],
        ),
        (families.MISTRAL, ["AVAILABLE_TOOLS", f'"arguments": {CITY}, "id": "{ID}"', "sunny"]),
        (families.DEEPSEEK, [f"weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>", "sunny"]),
        (
            families.PHI4,
            ["Be brief.<|tool|>[{", "<|tool_call|>[{", CITY, "<|tool|>sunny<|end|><|user|>Sure?"],
        ),
        (families.GEMMA4, ["<tool_call|><|tool_response>weather:sunny<tool_response|><turn|>"]),
        (
            CHATML,
            [
                "<|im_start|>system\nBe brief.\n\nYou can call functions.",
                '<tools>\n{"name":"weather","description":"Weather."',
                f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call><|im_end|>',
                "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\nSure?<|im_end|>",
            ],
        ),
        (ALTERNATING, []),
    ],
)
def test_a_conversation_with_calls_reaches_every_template(source, parts) -> None:
    messages = ASKED if learned(source)[1].system else ASKED[1:]
    text = prompt(source, messages)
    places = [text.find(part) for part in (*parts, "Sure?")]
    assert -1 not in places and sorted(places) == places, text


def test_calls_come_one_by_one_where_a_template_writes_a_single_one() -> None:
    calls = [
        {"id": f"12345678{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        for index, name in enumerate(("weather", "now"))
    ]
    results = [
        {"role": "tool", "tool_call_id": f"12345678{index}", "content": f"result {index}"}
        for index in (1, 0)
    ]
    messages = [ASKED[1], {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    text = prompt(families.HARMONY, messages)
    assert text.index("functions.weather<|channel|>") < text.index("result 0")
    assert text.index("result 0") < text.index("functions.now<|channel|>") < text.index("result 1")


def test_ids_of_others_are_made_short_where_they_must_be() -> None:
    called = {**ASKED[2], "tool_calls": [CALL | {"id": "call_1"}]}
    messages = [ASKED[1], called, {**ASKED[3], "tool_call_id": "call_1"}]
    assert '"city": "Rome"}, "id": "' in prompt(families.MISTRAL, messages)
    assert "call_1" not in prompt(families.MISTRAL, messages)
    assert ID in prompt(families.MISTRAL)


def test_reasoning_has_the_name_that_the_template_reads() -> None:
    thought = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
    assert "analysis<|message|>Hm.<|end|>Hi." in prompt(families.HARMONY, [ASKED[1], thought], ())


def test_without_tools_a_template_gets_none() -> None:
    assert "tool" not in prompt(CHATML, ASKED[:2], ())
    assert "tool" not in prompt(families.HERMES, ASKED[:2], ())


def test_a_template_for_tools_is_used_with_tools_alone() -> None:
    from ropewalk.model.chat.template import _from_source

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools!"}]
    template = _from_source(named, {})
    assert template is not None
    for tools, text in (([TOOL], "tools!"), (None, "plain")):
        variables = {"tools": tools}
        assert template.render([], add_generation_prompt=True, variables=variables) == text
