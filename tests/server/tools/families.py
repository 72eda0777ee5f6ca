"""Small chat templates and answers in the manner of published families, and what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk.server.tools.parser import Delta

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: Mapping[str, Mapping] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class Read:
    """A parsed answer, without the calls' ids."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def joined(deltas: list[Delta]) -> Read:
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.name:
            assert delta.call not in calls and delta.id and not delta.arguments
            calls[delta.call] = [delta.name, ""]
        elif delta.call is not None:
            calls[delta.call][1] += delta.arguments
    return Read(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [(name, arguments) for name, arguments in calls.values()],
    )


HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "</tools><tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = HERMES + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
CODER = QWEN3.replace("<tool_call></tool_call>", "<tool_call><function=x><parameter=y>")
LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if tools %}Environment: ipython\n"
    'Respond in the format {"name": …, "parameters": …}.\n'
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
MISTRAL11 = MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS]").replace("(c.f", "'[ARGS]' ~ (c.f")
PHI4 = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'system' and m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>"
    "{% endfor %}<|assistant|>"
)
GEMMA4 = (
    "{% for t in tools or [] %}<|tool>{{ t.function.name }}<tool|>{% endfor %}"
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "<|tool_call>call:{{ c.function.name ~ '{' }}"
    '{% for k, v in c.function.arguments.items() %}{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}{{ "}" }}'
    "<tool_call|>{% endfor %}{% for r in m.tool_responses %}<|tool_response>"
    "{{ r.name }}:{{ r.response }}<tool_response|>{% endfor %}<turn|>\n{% endfor %}"
)
HARMONY = (
    "{% for t in tools or [] %}namespace functions { {{ t.function.name }} }{% endfor %}"
    "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant to="
    "functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m['thinking'] %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{{ m.content }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}</think>{% endif %}{% endfor %}"
)
CITY = '{"city": "Rome"}'
CALLED = [("weather", CITY)]
# Template, what its model answers, what that means.
FAMILIES: Mapping[str, tuple[str, str, Read]] = {
    "hermes": (
        HERMES,
        'One moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        Read("One moment.", "", [*CALLED, ("now", "{}")]),
    ),
    "smollm2": (
        HERMES,
        '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now"}]'
        "</tool_call>",
        Read("", "", [*CALLED, ("now", "{}")]),
    ),
    "qwen3": (
        QWEN3,
        "<think>\nWhich city?\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        Read("", "Which city?", CALLED),
    ),
    "qwen3-coder": (
        CODER,
        "So:\n<tool_call>\n<function=weather>\n<parameter=city>\nRo\nme\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        Read("So:", "", [("weather", '{"city": "Ro\\nme", "days": 3}')]),
    ),
    "llama3": (
        LLAMA3,
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"type": "function", "function": '
        '"now", "parameters": {}}',
        Read("", "", [*CALLED, ("now", "{}")]),
    ),
    "llama3-tag": (
        LLAMA3,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
        Read("", "", CALLED),
    ),
    "llama3-json": (
        LLAMA3,
        '{"name": "Rome", "parameters": {"city": "a"}} is JSON.',
        Read('{"name": "Rome", "parameters": {"city": "a"}} is JSON.'),
    ),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "123456789"}]',
        Read("", "", CALLED),
    ),
    "mistral-11": (
        MISTRAL11,
        '[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}'
        "[TOOL_CALLS]now[ARGS]{}",
        Read("Yes.", "Hm.", [*CALLED, ("now", "{}")]),
    ),
    "phi4": (
        PHI4,
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|>',
        Read("", "", CALLED),
    ),
    "phi4-functools": (
        PHI4,
        'functools[{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}]',
        Read("", "", CALLED),
    ),
    "gemma4": (
        GEMMA4,
        '<|channel>thought\nHm.\n<channel|>So.<|tool_call>call:weather{city:<|"|>Ro"me<|"|>,'
        'days:2,l:[true,{a:<|"|>b<|"|>}]}<tool_call|>',
        Read("So.", "Hm.", [("weather", '{"city":"Ro\\"me","days":2,"l":[true,{"a":"b"}]}')]),
    ),
    "gpt-oss": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.weather <|constrain|>json<|message|>" + CITY,
        Read("", "Hm.", CALLED),
    ),
    "gpt-oss-role": (
        HARMONY,
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant "
        "to=functions.weather<|channel|>commentary json<|message|>" + CITY + "<|call|>",
        Read("Let me see.", "", CALLED),
    ),
    "gpt-oss-text": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        Read("Hi.", "Hm."),
    ),
    "deepseek": (
        DEEPSEEK,
        "<think>Hm.</think>So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + CITY
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Read("So.", "Hm.", CALLED),
    ),
    "deepseek-r1": (
        DEEPSEEK,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + CITY
        + "\n```<｜tool▁call▁end｜>",
        Read("", "", CALLED),
    ),
}
