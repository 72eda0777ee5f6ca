"""The terminal client: streams, remembers, survives refusals, and tells what it cannot do."""

import io
import json
import socket

import pytest

from server.chat import (
    HELP,
    Answer,
    Chat,
    ChatOptions,
    Client,
    Refused,
    converse,
    printable,
    stats_line,
    terminal_lines,
)
from server.errors import CommandError, UsageError
from tests.server.fake_server import events, serving


def options(url: str, **changes: object) -> ChatOptions:
    plain = {
        "url": url,
        "model": None,
        "api_key": None,
        "system": None,
        "sampling": {"max_tokens": 9},
        "timeout_s": 5.0,
        "stats": False,
    }
    return ChatOptions(**(plain | changes))


def delta(**fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def talkative(path, body):
    """Answers with the number of messages so far, in three pieces."""
    if path == "/v1/models":
        return 200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"completion_tokens": 3}}
    said = str(len(body["messages"]))
    pieces = [delta(role="assistant"), delta(content="I heard "), delta(content=said)]
    return 200, b": ping\n\n" + events(*pieces, last, usage)


def test_one_question_is_streamed_and_ends_with_a_newline() -> None:
    out = io.StringIO()
    with serving(talkative) as seen:
        assert converse(options(seen.url), "hello", iter(()), out) == 0
    assert out.getvalue() == "I heard 1\n"
    assert seen.paths == ["/v1/models", "/v1/chat/completions"]
    assert seen.bodies[1] == {
        "model": "first",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
    }


def test_conversation_is_remembered_reset_and_instructed() -> None:
    out = io.StringIO()
    lines = ["one\n", "two\n", "\n", "/reset\n", "three\n", "/system be brief\n", "four\n"]
    with serving(talkative) as seen:
        settings = options(seen.url, model="second", api_key="secret")
        assert converse(settings, None, iter([*lines, "/quit\n", "never\n"]), out) == 0
    assert "/v1/models" not in seen.paths
    assert {headers["authorization"] for headers in seen.headers} == {"Bearer secret"}
    conversations = [[m["content"] for m in body["messages"]] for body in seen.bodies]
    assert conversations == [
        ["one"],
        ["one", "I heard 1", "two"],
        ["three"],
        ["be brief", "four"],
    ]
    assert seen.bodies[3]["messages"][0]["role"] == "system"
    assert "never" not in str(seen.bodies)


def test_unknown_command_shows_the_help() -> None:
    out = io.StringIO()
    with serving(talkative) as seen:
        converse(options(seen.url, model="m"), None, iter(["/what\n", "/system\n"]), out)
    assert out.getvalue() == f"{HELP}\n{HELP}\n"
    assert seen.paths == []


def refusing(path, body):
    message = "the prompt has 9 tokens and the context 8"
    return 400, json.dumps({"error": {"message": message}}).encode()


def test_refused_question_is_forgotten_and_the_conversation_goes_on() -> None:
    out = io.StringIO()
    with serving(refusing) as seen:
        assert converse(options(seen.url, model="m"), None, iter(["a", "b"]), out) == 1
    assert [len(body["messages"]) for body in seen.bodies] == [1, 1]
    assert out.getvalue().count("400: the prompt has 9 tokens and the context 8\n") == 2


def test_refused_single_question_is_an_error() -> None:
    with serving(refusing) as seen, pytest.raises(Refused, match="9 tokens"):
        converse(options(seen.url, model="m"), "a", iter(()), io.StringIO())


def test_missing_key_names_the_flag() -> None:
    def locked(path, body):
        return 401, b'{"error": {"message": "key needed"}}'

    with serving(locked) as seen, pytest.raises(Refused, match="key needed; give the key with"):
        Client(options(seen.url)).models()


def test_error_in_the_stream_keeps_what_came_before_on_the_screen() -> None:
    out = io.StringIO()

    def failing(path, body):
        return 200, events(delta(content="half"), {"error": {"message": "engine died"}}, done=False)

    with serving(failing) as seen, pytest.raises(Refused, match="engine died"):
        converse(options(seen.url, model="m"), "a", iter(()), out)
    assert out.getvalue() == "half\n"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, events(delta(content="half"), done=False)), "broke off the answer"),
        ((404, b"<html>"), "answered 404; is this a Ropewalk or OpenAI server"),
        ((500, b"[]"), "answered 500; is this"),
    ],
)
def test_odd_servers_are_told_apart(reply, words) -> None:
    with serving(lambda path, body: reply) as seen, pytest.raises(CommandError, match=words):
        converse(options(seen.url, model="m"), "a", iter(()), io.StringIO())


def test_no_models() -> None:
    with (
        serving(lambda path, body: (200, b'{"data": []}')) as seen,
        pytest.raises(CommandError, match="lists no model"),
    ):
        converse(options(seen.url), "a", iter(()), io.StringIO())


def test_no_server_names_the_next_step() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(CommandError, match=f"no answer from {url}.*ropewalk serve"):
            Client(options(url)).models()


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://x", "http://", "", "http://x:8O00", "http://x:99999", "http://[::1"],
)
def test_odd_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not an http or https URL"):
        Client(options(url))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_address_may_end_in_v1(suffix: str) -> None:
    with serving(talkative) as seen:
        assert Client(options(seen.url + suffix)).models() == ["first", "second"]
    assert seen.paths == ["/v1/models"]


def test_interrupt_keeps_the_half_answer_and_ends_the_request() -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if text == "half":
                super().write(text)
                raise KeyboardInterrupt
            return super().write(text)

    out = Interrupting()
    with serving(lambda path, body: (200, events(delta(content="half")))) as seen:
        chat = Chat(Client(options(seen.url)), "m", out)
        answer = chat.say("a")
    assert answer.finish == "interrupted"
    assert chat.messages[-1] == {"role": "assistant", "content": "half"}
    assert out.getvalue() == "half\n"


def test_stats() -> None:
    out = io.StringIO()
    with serving(talkative) as seen:
        converse(options(seen.url, stats=True), "hello", iter(()), out)
    assert out.getvalue().splitlines()[1].startswith("(3 tokens, first after ")
    timed = Answer(text="x", finish="stop", tokens=11, first_s=0.25, total_s=2.25)
    assert stats_line(timed) == "11 tokens, first after 250 ms, 5.0 tokens/s"
    assert stats_line(Answer(finish="stop", tokens=1)) == "1 token, stop"
    stopped = Answer(text="x", finish="interrupted", first_s=0.25, total_s=2.25)
    assert stats_line(stopped) == "interrupted, first after 250 ms"


def test_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\r\x9b\u202ec\n\té語") == "a[2Jbc\n\té語"


def test_terminal_lines_end_quietly(monkeypatch, capsys) -> None:
    answers = iter(["hi"])

    def typed(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert list(terminal_lines()) == ["hi"]
    assert capsys.readouterr().out == "\n"
