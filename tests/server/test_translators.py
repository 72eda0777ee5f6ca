"""Responses and Messages in front of chat: what they ask chat, and what they make of its answer."""

import json
from dataclasses import replace

import httpx
import pytest

from ropewalk.server.errors import QueueFull, RequestFailed
from ropewalk.server.http.door import SURE
from ropewalk.server.openai.body import read_body
from ropewalk.server.scheduling.request import Outlook
from ropewalk.server.tools.conventions import Conventions, Told
from ropewalk.server.tools.formats import HERMES, THINK
from ropewalk.server.translators.messages_body import MessagesBody
from ropewalk.server.translators.responses_body import ResponsesBody
from tests.server.sockets import connect, post, read_until
from tests.server.toy import (
    CONTEXT,
    ScriptedEngine,
    ask,
    chat,
    running,
    sample,
    toy,
    toy_app,
    wait_for,
)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT, COUNT_INPUT = f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"
USER = {"role": "user", "content": "hi"}
BODIES = {
    RESPONSES: {"input": "hi", "max_output_tokens": 5},
    MESSAGES: {"messages": [USER], "max_tokens": 5},
    COUNT: {"messages": [USER]},
    COUNT_INPUT: {"input": "hi"},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}


def send(app, path: str, **more):
    return ask(app, "POST", path, json=BODIES[path] | more)


def events(text: str) -> list[dict]:
    """The data of every event, which names its type twice."""
    found = []
    for lines in text.split("\n\n")[:-1]:
        name, data = lines.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def types(found: list[dict]) -> list[str]:
    return [each["type"] for each in found]


def text(kind: str, said: str) -> dict:
    return {"type": kind, "text": said}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"input": "hi"}, {"messages": [USER]}),
        (
            {"input": [USER], "instructions": "be kind", "temperature": 0, "top_k": 3, "seed": 1},
            {
                "messages": [{"role": "system", "content": "be kind"}, USER],
                "temperature": 0.0, "top_k": 3, "seed": 1,
            },
        ),
        (
            {
                "input": [
                    {"type": "message", "role": "developer", "content": [text("input_text", "a")]},
                    {"type": "reasoning", "id": "rs_1", "summary": [],
                     "content": [text("reasoning_text", "hm")], "encrypted_content": None},
                    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                     "content": [{**text("output_text", "b"), "annotations": []}]},
                    {"type": "function_call", "call_id": "c1", "name": "f",
                     "arguments": '{"a": 1}'},
                    {"type": "function_call_output", "call_id": "c1", "output": "2"},
                    {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                    {"role": "assistant", "content": "c"},
                    {"role": "assistant", "content": "d"},
                ]
            },
            {
                "messages": [
                    {"role": "developer", "content": [text("text", "a")]},
                    {"role": "assistant", "reasoning_content": "hm",
                     "content": [text("text", "b")], "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "2"},
                    {"role": "assistant", "content": "c"},
                    {"role": "assistant", "content": "d"},
                ]
            },
        ),
        (
            {
                "input": "hi", "stream": True, "max_output_tokens": 7, "store": True,
                "tools": [{"type": "function", **FUNCTION, "strict": None}, {"type": "web_search"}],
                "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False,
                "reasoning": {"effort": "low", "summary": "auto"}, "include": ["x"],
                "text": {"verbosity": "low", "format": {
                    "type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            },
            {
                "messages": [USER], "stream": True, "stream_options": {"include_usage": True},
                "max_completion_tokens": 7, "reasoning_effort": "low", "verbosity": "low",
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
                "response_format": {"type": "json_schema", "json_schema": {
                    "name": "n", "schema": SCHEMA, "strict": True}},
            },
        ),
        (
            {
                "input": "hi", "text": {"format": {"type": "json_object"}},
                "tools": [{"type": "function", "name": name} for name in "fg"],
                "tool_choice": {"type": "allowed_tools", "mode": "required",
                                "tools": [{"type": "function", "name": "g"}]},
            },
            {
                "messages": [USER], "response_format": {"type": "json_object"},
                "tools": [{"type": "function", "function": {"name": "g"}}],
                "tool_choice": "required",
            },
        ),
        (
            {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": []}],
             "tool_choice": "auto"},
            {"messages": [USER]},
        ),
    ],
)  # fmt: skip
def test_what_responses_ask_chat(given, asked):
    assert read_body(ResponsesBody, given).chat(given) == asked


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"messages": [USER]}, {"messages": [USER], "enable_thinking": False}),
        (
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
        ),
        (
            {"messages": [
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "Zürich 東京"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": None}]},
            ]},
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [
                        {**CALL, "function": {"name": "f", "arguments": '{"a": "Zürich 東京"}'}}]},
                    {"role": "tool", "tool_call_id": "c1", "content": ""},
                ],
                "enable_thinking": False,
            },
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("text", "b"),
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                        {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
                         "content": [text("text", "3")]},
                        {**text("text", "go on"), "cache_control": {"type": "ephemeral"}}]},
                    {"role": "system", "content": "soon"},
                ],
                "system": [text("text", "be kind")], "stop_sequences": ["x"], "top_p": 0.5,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "metadata": {"user_id": None}, "output_config": {"effort": "high"},
            },
            {
                "messages": [
                    {"role": "system", "content": [text("text", "be kind")]},
                    USER,
                    {"role": "assistant", "reasoning_content": "hm",
                     "content": [text("text", "b")], "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "2"},
                    {"role": "tool", "tool_call_id": "c2", "content": [text("text", "3")]},
                    {"role": "user", "content": [text("text", "go on")]},
                    {"role": "system", "content": "soon"},
                ],
                "stop": ["x"], "top_p": 0.5, "enable_thinking": True, "reasoning_effort": "high",
            },
        ),
        (
            {
                "messages": [USER],
                "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA},
                          {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                "output_format": {"type": "json_schema", "schema": SCHEMA},
            },
            {
                "messages": [USER], "enable_thinking": False,
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required", "parallel_tool_calls": False,
                "response_format": {"type": "json_schema", "json_schema": {
                    "name": "answer", "schema": SCHEMA}},
            },
        ),
        (
            {"messages": [USER], "tools": [{"name": "f", "input_schema": SCHEMA}],
             "tool_choice": {"type": "tool", "name": "f"}},
            {
                "messages": [USER], "enable_thinking": False,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
    ],
)  # fmt: skip
def test_what_messages_ask_chat(given, asked):
    given = {"max_tokens": 7, **given}
    assert read_body(MessagesBody, given).chat(given) == {**asked, "max_completion_tokens": 7}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (RESPONSES, {"input": [{"type": "foo"}]}, "input[0]", "invalid_value"),
        (RESPONSES, {"input": 3}, "input", "invalid_value"),
        (RESPONSES, {"input": []}, "input", "invalid_value"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type", "invalid_value"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
         "input[0].arguments", "missing_required_parameter"),
        (RESPONSES, {"input": "h" * 600}, "input", "context_length_exceeded"),
        (RESPONSES, {"max_output_tokens": 600}, "max_output_tokens", "context_length_exceeded"),
        (RESPONSES, {"previous_response_id": "r"}, "previous_response_id", "unsupported_parameter"),
        (RESPONSES, {"conversation": "c"}, "conversation", "unsupported_parameter"),
        (RESPONSES, {"background": True}, "background", "unsupported_parameter"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include",
         "unsupported_parameter"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice", "invalid_value"),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools", "tools": ["f"]}},
         "tool_choice.tools[0]", "invalid_value"),
        (RESPONSES, {"input": [USER] * 4097}, "input", "invalid_value"),
        (RESPONSES, {"tools": [{"type": "web_search"}] * 257}, "tools", "invalid_value"),
        (RESPONSES, {"metadata": {f"{place}": "" for place in range(17)}}, "metadata",
         "invalid_value"),
        (RESPONSES, {"n": 2}, "n", "invalid_value"),
        (RESPONSES, {"keep": True}, "keep", "invalid_value"),
        (RESPONSES, {"frob": 2}, "frob", "unknown_parameter"),
        (RESPONSES, {"model": "other"}, "model", "model_not_found"),
        (MESSAGES, {"max_tokens": None}, "max_tokens is missing", "invalid_request_error"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0] should be an object of a supported type", "invalid_request_error"),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "I"}]},
         "messages end with the assistant's", "invalid_request_error"),
        (MESSAGES, {"stop_sequences": ["x" * 300]}, "stop_sequences", "invalid_request_error"),
        (MESSAGES, {"messages": [{**USER, "content": "h" * 600}]}, "messages has",
         "invalid_request_error"),
        (MESSAGES, {"messages": [USER] * 4097}, "messages should have at most 4096 items",
         "invalid_request_error"),
        (MESSAGES, {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * 4097}]},
         "messages[0].content should have at most 4096 items", "invalid_request_error"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}] * 257},
         "tools should have at most 256 items", "invalid_request_error"),
        (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers", "invalid_request_error"),
        (MESSAGES, {"thread": {"type": "create"}}, "thread", "invalid_request_error"),
        (MESSAGES, {"model": "other"}, "model", "not_found_error"),
        (COUNT, {"messages": [3]}, "messages[0]", "invalid_request_error"),
        (COUNT_INPUT, {"input": [3]}, "input[0]", "invalid_value"),
        (MESSAGES, {"tools": [{"name": "f"}]}, "tools[0].input_schema is missing",
         "invalid_request_error"),
        (RESPONSES, {"tools": [{"name": "f"}]}, "tools[0].type", "missing_required_parameter"),
        (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "function", "function": FUNCTION}]},
         "tools[1].name", "missing_required_parameter"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": "x"}]},
         "tools[0].parameters", "invalid_value"),
        (RESPONSES, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice.name", "missing_required_parameter"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "f"}}},
         "text.format.schema", "missing_required_parameter"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_as_the_client_knows_it(path, body, param, code):
    response = send(toy_app(), path, **body)
    error = response.json()["error"]
    assert response.status_code == (404 if "not_found" in code else 400)
    if path.startswith(RESPONSES):
        assert (error["param"], error["code"]) == (param, code)
    else:
        assert response.json()["type"] == "error" and error["type"] == code
        assert error["message"].startswith(param)


def test_clients_are_told_in_their_words_what_they_can_do_about_it():
    """litellm and LangChain shorten the prompt; Anthropic's client leaves out the thread."""
    long = "h" * 600
    for path, body in (
        (MESSAGES, BODIES[MESSAGES] | {"messages": [{**USER, "content": long}]}),
        (RESPONSES, BODIES[RESPONSES] | {"input": long}),
        ("/v1/completions", {"model": "toy", "prompt": long}),
    ):
        message = ask(toy_app(), "POST", path, json=body).json()["error"]["message"]
        assert "prompt is too long" in message
        assert "this model's maximum context length is" in message
    error = send(toy_app(), MESSAGES, thread={"type": "create"}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in send(toy_app(), MESSAGES, model="other").json()["error"]


def test_a_whole_response():
    body = send(toy_app(), RESPONSES, instructions="be kind", metadata={"a": "b"}).json()
    assert body["id"].startswith("resp_") and body["object"] == "response"
    assert (body["status"], body["error"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (body["instructions"], body["metadata"], body["store"]) == ("be kind", {"a": "b"}, False)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    usage = body["usage"]
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5


def test_a_streamed_response_builds_the_whole_one():
    found = events(send(toy_app(), RESPONSES, stream=True, stop=[","]).text)
    assert types(found) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 5,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert "".join(each.get("delta", "") for each in found) == "Hello" == found[-4]["text"]
    last = found[-1]["response"]
    assert last["output"] == [found[-2]["item"]] and last["usage"]["output_tokens"] == 5
    assert {each.get("item_id", last["output"][0]["id"]) for each in found} == {
        last["output"][0]["id"]
    }


def test_an_answer_that_ends_by_itself_is_completed():
    for stop in (["lo"], ["H"]):  # the second leaves an empty text, which is there all the same
        body = send(toy_app(), RESPONSES, stop=stop).json()
        assert body["status"] == "completed" and body["incomplete_details"] is None
        assert body["output"][0]["content"][0]["text"] == "Hello".partition(stop[0])[0]


def test_a_whole_message():
    engine = ScriptedEngine(cached=3)
    app = toy_app(engine)
    body = send(app, MESSAGES).json()
    assert body.pop("id").startswith("msg_")
    count = send(app, COUNT).json()["input_tokens"]
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": count - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 5,
        },
    }


def test_a_streamed_message_builds_the_whole_one():
    engine = ScriptedEngine(cached=3)
    app = toy_app(engine)
    found = events(send(app, MESSAGES, stream=True).text)
    assert types(found) == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert "".join(each["delta"]["text"] for each in found[2:7]) == "Hello"
    whole = send(app, MESSAGES).json()
    assert found[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert found[-2]["usage"] == whole["usage"]
    assert found[0]["message"]["usage"] | {"output_tokens": 5} == whole["usage"]


@pytest.mark.parametrize(
    ("more", "reason", "sequence"),
    [
        ({"stop_sequences": ["lo"]}, "stop_sequence", "lo"),
        ({"max_tokens": 10**6}, "model_context_window_exceeded", None),
        ({"stop_token_ids": [ord("l")]}, "end_turn", None),
    ],
)
def test_why_a_message_ends(more, reason, sequence):
    body = send(toy_app(), MESSAGES, **more).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


SAID = (
    '<think>hm</think>Say.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>'
)
TOOLS = {
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {"name": "f", "input_schema": SCHEMA},
}

WRITES = Conventions(format=replace(HERMES, think=THINK), told=Told.TOOLS)


def saying(said: str, batch: int):
    """An application of a model that says it, and writes calls and reasoning as Hermes and Qwen."""
    engine = ScriptedEngine(lambda request: list(said.encode()), batch=batch)
    return toy_app(engine, [toy(conventions=WRITES)])


def asking(path: str, said: str, batch: int = 1, **more):
    limit = {"max_output_tokens": 200} if path == RESPONSES else {"max_tokens": 200}
    return send(saying(said, batch), path, tools=[TOOLS[path]], **{**limit, **more})


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_reasoning_text_and_calls_are_items_of_a_response(batch):
    whole = asking(RESPONSES, SAID, batch).json()
    found = events(asking(RESPONSES, SAID, batch, stream=True).text)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    last = found[-1]["response"]
    assert found[-1]["type"] == "response.completed" and whole["status"] == "completed"
    assert whole["usage"] == last["usage"]
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < len(SAID)
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert last["output"] == done
    for output in (whole["output"], done):
        thought, message, *calls = output
        assert thought["summary"] == []
        assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert message["content"][0]["text"] == "Say."
        assert [(each["name"], json.loads(each["arguments"])) for each in calls] == [
            ("f", {"a": 1}),
            ("f", {"a": 2}),
        ]
        assert len({each["id"] for each in output} | {each["call_id"] for each in calls}) == 6
    kinds = {"reasoning": "reasoning_text", "message": "output_text"}
    for index, item in enumerate(done):
        own = [each for each in found if each.get("output_index") == index]
        kind = kinds.get(item["type"], "function_call_arguments")
        text = "".join(each["delta"] for each in own if each["type"] == f"response.{kind}.delta")
        assert text == item.get("arguments") or text == item["content"][0]["text"]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["id"] == item["id"] and own[0]["item"]["status"] == "in_progress"
        (ended,) = [each for each in own if each["type"] == f"response.{kind}.done"]
        assert text == (ended.get("arguments") or ended["text"])


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_reasoning_text_and_calls_are_blocks_of_a_message(batch):
    whole = asking(MESSAGES, SAID, batch).json()
    thought, said, *calls = whole["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert said == {"type": "text", "text": "Say."}
    assert [(each["type"], each["name"], each["input"]) for each in calls] == [
        ("tool_use", "f", {"a": 1}),
        ("tool_use", "f", {"a": 2}),
    ]
    assert whole["stop_reason"] == "tool_use"
    found = events(asking(MESSAGES, SAID, batch, stream=True).text)
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    built = []
    for each in found:
        if each["type"] == "content_block_start":
            assert each["index"] == len(built)
            built.append("")
        elif each["type"] == "content_block_delta":
            assert each["index"] == len(built) - 1
            built[-1] += next(each["delta"][name] for name in each["delta"] if name != "type")
    assert built[:2] == ["hm", "Say."]
    assert [json.loads(each) for each in built[2:]] == [{"a": 1}, {"a": 2}]


def test_a_call_that_is_cut_has_what_is_complete_of_its_arguments():
    said = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": "x'
    (call,) = asking(MESSAGES, said, max_tokens=len(said)).json()["content"]
    assert call["input"].pop("a") == 1
    (call,) = asking(RESPONSES, said, max_output_tokens=len(said)).json()["output"]
    assert call["status"] == "incomplete" and call["arguments"].startswith('{"a": 1')


def test_what_a_model_called_is_told_it_again():
    """An answer's items and blocks, and the results, come to the template as chat's do."""
    engine = ScriptedEngine()
    app = toy_app(engine)
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    blocks = [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]
    results = [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    answers = [
        chat(app, messages=messages, max_tokens=1),
        send(app, RESPONSES, input=[USER, call, result]),
        send(
            app,
            MESSAGES,
            messages=[
                USER,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": results},
            ],
        ),
    ]
    assert [each.status_code for each in answers] == [200] * 3
    prompts = {bytes(request.tokens[: request.num_prompt]) for request in engine.requests}
    assert len(prompts) == 1


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_failure_is_told_in_the_api_s_own_way(path):
    engine = ScriptedEngine()
    app = toy_app(engine)
    engine.failure_at = (3, RequestFailed("logits are not finite"))
    whole, streamed = send(app, path), send(app, path, stream=True)
    assert whole.status_code == 500 and streamed.status_code == 200
    last = events(streamed.text)[-1]
    if path == RESPONSES:
        assert whole.json()["error"]["message"] == "logits are not finite"
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["message"] == "logits are not finite"
        (cut,) = last["response"]["output"]
        assert cut["content"][0]["text"] == "He" and cut["status"] == "incomplete"
    else:
        error = {"type": "api_error", "message": "logits are not finite"}
        assert whole.json() == last == {"type": "error", "error": error}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_client_that_leaves_is_aborted(path):
    engine = ScriptedEngine(pause=0.01)
    with running(toy_app(engine)) as (url, _), connect(url) as client:
        client.sendall(post(path, BODIES[path] | {"stream": True, "stop_token_ids": [0]}))
        read_until(client, b"delta")
        client.close()
        wait_for(lambda: engine.live == 0)
    assert len(engine.aborted) + len(engine.ended) == 1


@pytest.mark.parametrize(("path", "ping"), [(RESPONSES, b": ping"), (MESSAGES, b"event: ping\n")])
def test_an_idle_stream_is_kept_open(path, ping):
    engine = ScriptedEngine(pause=0.2)
    with running(toy_app(engine, ping_s=0.05)) as (url, _), connect(url) as client:
        client.sendall(post(path, BODIES[path] | {"stream": True}))
        read_until(client, ping)


def test_a_response_that_fails_before_its_first_token_has_begun():
    """As clients expect of a stream that was pinged."""
    engine = ScriptedEngine(pause=0.5)
    app = toy_app(engine, first_ping_s=0.05, request_timeout_s=0.2)
    with running(app) as (url, _):
        answer = httpx.post(f"{url}{RESPONSES}", json=BODIES[RESPONSES] | {"stream": True})
    said = events(answer.text.replace(": ping\n\n", ""))
    kinds = [each["type"] for each in said]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    assert [each["sequence_number"] for each in said] == [0, 1, 2]


OVERLOADED = Outlook(seats=0, waiting=3, places=3, most_s=5 / SURE)


@pytest.mark.parametrize(
    ("status", "kind", "more", "change"),
    [
        (401, "authentication_error", {"headers": {"x-api-key": "wrong"}}, {}),
        (413, "request_too_large", {"json": {"messages": "x" * 5000}}, {}),
        (415, "invalid_request_error", {"content": b"{}"}, {}),
        (429, "rate_limit_error", {}, {"refuse": QueueFull("full")}),
        (429, "rate_limit_error", {}, {"ahead": OVERLOADED}),
        (503, "overloaded_error", {}, {"draining": True}),
    ],
)
def test_errors_of_the_middleware_have_the_form_of_messages(status, kind, more, change):
    engine = ScriptedEngine()
    app = toy_app(engine, api_keys=frozenset({"sesame"}), max_body_bytes=4096)
    app.state.drain.draining = change.pop("draining", False)
    for name, value in change.items():
        setattr(engine, name, value)
    more = {"headers": {"x-api-key": "sesame"}, **more}
    more |= {} if more.keys() & {"json", "content"} else {"json": BODIES[MESSAGES]}
    response = ask(app, "POST", MESSAGES, **more)
    assert response.status_code == status and response.headers["x-request-id"]
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == kind
    if more.keys() & {"json"}:
        assert set(ask(app, "POST", RESPONSES, **more).json()) == {"error"}


def test_either_header_may_have_the_key():
    keys = frozenset({"sesame", "other"})
    engine = ScriptedEngine()
    app = toy_app(engine, api_keys=keys)
    for headers, status in [
        ({"x-api-key": "sesame"}, 200),
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "sesame"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "wrong"}, 401),
        ({"authorization": "sesame", "x-api-key": ""}, 401),
    ]:
        response = ask(app, "POST", MESSAGES, json=BODIES[MESSAGES], headers=headers)
        assert response.status_code == status, headers
    # One client, whichever header it uses: for its turns and for its cached prefixes.
    assert len({(request.client, request.salt) for request in engine.requests}) == 1
    assert engine.requests[0].client


def test_requests_are_counted_by_route():
    app = toy_app()
    for path in BODIES:
        assert send(app, path).status_code == 200
        labels = {"route": path, "method": "POST", "status": "200"}
        assert sample(app.state.metrics, "http_requests_total", **labels) == 1


def test_the_openai_package_reads_responses():
    import openai

    with (
        running(toy_app()) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        first = client.responses.create(model="toy", input="hi", max_output_tokens=5)
        assert first.output_text == "Hello"
        counted = client.responses.input_tokens.count(model="toy", input="hi")
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == first.usage.input_tokens
        again = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "?"}]
        with client.responses.stream(
            model="toy", input=again, extra_body={"stop": [","]}
        ) as stream:
            said = "".join(each.delta for each in stream if each.type.endswith("text.delta"))
        assert said == stream.get_final_response().output_text == "Hello"


@pytest.mark.parametrize(("path", "count"), [(MESSAGES, COUNT), (RESPONSES, COUNT_INPUT)])
def test_prompts_that_are_too_long_are_counted(path, count):
    """It is by the count that a client learns so."""
    said = "a" * 3 * CONTEXT
    long = {"messages": [USER | {"content": said}]} if path == MESSAGES else {"input": said}
    assert send(toy_app(), count, **long).json()["input_tokens"] > 3 * CONTEXT
    assert send(toy_app(), path, **long).status_code == 400
