"""Tools and reasoning in /v1/chat/completions: fields in, messages and chunks out."""

import json

import pytest

from ropewalk.server.openai.body import read_body
from ropewalk.server.openai.schemas import ChatBody
from ropewalk.server.tools.conventions import Conventions
from ropewalk.server.tools.formats import THINK, Format
from tests.server.toy import ScriptedEngine, ask, events, toy, toy_app

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CONTEXT = 4096
TOY = toy(max_context=CONTEXT)
THINKS = toy(max_context=CONTEXT, conventions=Conventions(format=Format(think=THINK)))


def called(parameters: dict) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def chat(answer: str, served=TOY, batch: int = 1, **body):
    engine = ScriptedEngine(lambda request: list(answer.encode()), batch=batch)
    engine.context = CONTEXT
    plain = {"messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS, "max_tokens": 300}
    app = toy_app(engine, [served])
    return engine, ask(app, "POST", "/v1/chat/completions", json=plain | body)


def answered(answer: str, **body) -> dict:
    response = chat(answer, **body)[1]
    assert response.status_code == 200, response.text
    return response.json()


def chunks(answer: str, **body) -> list[dict]:
    return events(chat(answer, stream=True, **body)[1].text)


def deltas(answer: str, **body) -> list[dict]:
    return [chunk["choices"][0]["delta"] for chunk in chunks(answer, **body)]


def test_a_call_is_no_text() -> None:
    choice = answered(f"One moment.\n{CALL}{CALL}")["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "One moment."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'}
    ] * 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert answered(CALL)["choices"][0]["message"]["content"] is None


def test_text_stays_text() -> None:
    choice = answered("Hi.\n")["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi.\n"}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_a_stream_begins_a_call_with_its_name_and_goes_on_with_arguments(batch: int) -> None:
    first, *rest = deltas(f"Hi. {CALL}", batch=batch)
    assert first == {"role": "assistant", "content": ""}
    rest = [delta for delta in rest if delta]
    assert "".join(delta.get("content", "") for delta in rest) == "Hi."
    calls = [call for delta in rest for call in delta.get("tool_calls", ())]
    assert calls[0] == {
        "index": 0,
        "id": calls[0]["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
    assert len(calls) > 5 or batch > 1


def test_a_stream_ends_with_tool_calls_and_counts() -> None:
    *_, last, usage = chunks(CALL, stream_options={"include_usage": True})
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens"] == len(CALL) + 1
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_is_apart_and_counted() -> None:
    served = {"served": THINKS, "tools": []}
    answer = answered("<think>\nHm.\n</think>\n\nHi.", **served)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hi.",
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len("Hm.") < counted <= len("\nHm.\n</think>") + 1
    pieces = deltas("<think>Hm.</think>Hi.", **served)
    assert "".join(delta.get("reasoning_content", "") for delta in pieces) == "Hm."
    assert "".join(delta.get("content", "") for delta in pieces) == "Hi."


def test_a_prompt_that_ends_within_reasoning() -> None:
    messages = [{"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "<think>"}]
    body = {"served": THINKS, "messages": messages, "add_generation_prompt": False}
    assert answered("Hm.</think>Hi.", **body)["choices"][0]["message"]["reasoning"] == "Hm."


def test_one_call_ends_the_answer_if_they_are_not_to_be_parallel() -> None:
    engine, response = chat(CALL + CALL, parallel_tool_calls=False)
    choice = response.json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert len(engine.aborted) == 1
    assert response.json()["usage"]["completion_tokens"] < len(CALL)


def test_no_tools_are_called_where_none_may_be() -> None:
    engine, response = chat(CALL, tool_choice="none")
    choice = response.json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"
    assert b"weather" not in bytes(engine.requests[0].tokens)


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_model_is_told_of_the_tools_that_are_allowed() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    body = {"tools": [*TOOLS, other], "tool_choice": allowed("auto", "weather")}
    engine, response = chat(CALL, **body)
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert b"other" not in bytes(engine.requests[0].tokens)
    for mode in ("auto", "required"):
        plain = {"messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS}
        read = read_body(ChatBody, plain | {"tool_choice": allowed(mode, "now")})
        assert [tool.function.name for tool in read.told_tools] == ["now"]
        assert read.must_call == (mode == "required")


def test_the_model_is_told_of_tools_and_results() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Noon."}]},
    ]
    engine, _ = chat("Hi.", messages=messages)
    told = bytes(engine.requests[0].tokens).decode()
    assert '{"name":"now","description":"","parameters":{"type":"object"' in told
    assert '<assistant><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in told
    assert "<user><tool_response>\nNoon.\n</tool_response>" in told


def test_stop_strings_end_text_and_not_calls_or_reasoning() -> None:
    answer = f"<think>a STOP</think>b{CALL.replace('Rome', 'STOP')}c STOP d"
    choice = answered(answer, served=THINKS, stop=["STOP"])["choices"][0]
    assert choice["message"]["content"] == "b\nc "
    assert choice["message"]["reasoning"] == "a STOP"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "STOP"
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "STOP")


def test_a_cut_call_says_so() -> None:
    choice = answered(CALL, max_tokens=CALL.index("Rome") + 2)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'


def test_every_token_keeps_its_score_and_every_choice_its_calls() -> None:
    answer = answered(CALL, logprobs=True, n=2)
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["content"]) == len(CALL)
        assert len(choice["message"]["tool_calls"]) == 1
    scored = [
        entry
        for chunk in chunks(CALL, logprobs=True)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(scored) == len(CALL)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": allowed("auto", "x")}, "tool_choice"),
        ({"tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"tool_choice": "required", "tools": [called({"x-guidance": 5})]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "["}}},
         "response_format"),
        ({"chat_template_kwargs": {"x": ["y" * 16 * CONTEXT]}}, "chat_template_kwargs"),
        ({"tools": [called({"x": "y" * 16 * CONTEXT})]}, "tools"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(body: dict, param: str) -> None:
    response = chat("Hi.", **body)[1]
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_what_clients_always_send_is_taken() -> None:
    for body in ({"tools": []}, {"tool_choice": "auto"}, {"tool_choice": NAMED, "tools": []}):
        status = chat("Hi.", **body)[1].status_code
        assert status == (400 if body.get("tool_choice") == NAMED else 200)
