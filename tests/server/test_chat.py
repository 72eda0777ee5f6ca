"""The terminal client: streams, remembers, survives refusals, and tells what it cannot do."""

import errno
import io
import json
import os
import socket
import stat

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from ropewalk.server.cli.connect import address
from ropewalk.server.cli.conversation import (
    HELP,
    Answer,
    Chat,
    ChatOptions,
    Client,
    Refused,
    ask,
    converse,
    stats_line,
    typed_lines,
)
from ropewalk.server.errors import CommandError
from tests.server.fake_server import events, serving
from tests.server.test_printing import Terminal


def options(url: str, **changes: object) -> ChatOptions:
    plain = {
        "server": address(url),
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
        assert ask(options(seen.url), "hello", out) == 0
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
        assert converse(settings, iter([*lines, "/quit\n", "never\n"]), out, greet=False) == 0
    assert "/v1/models" not in seen.paths
    assert {headers["authorization"] for headers in seen.headers} == {"Bearer secret"}
    conversations = [[m["content"] for m in body["messages"]] for body in seen.bodies]
    assert conversations == [["one"], ["one", "I heard 1", "two"], ["three"], ["be brief", "four"]]
    assert seen.bodies[3]["messages"][0]["role"] == "system"
    assert "never" not in str(seen.bodies)


def commands(*lines: str) -> list[str]:
    """What the commands print, which ask the server nothing."""
    out = io.StringIO()
    with serving(talkative) as seen:
        assert converse(options(seen.url, model="m"), iter(lines), out, greet=False) == 0
    assert seen.paths == []
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sytem be brief", "/sytem is not a command; did you mean /system?"),
        ("/rest", "/rest is not a command; did you mean /reset?"),
        ("/usr/bin", "/usr/bin is not a command; /help lists the commands."),
        ("/\x1b[2J", "/[2J is not a command; /help lists the commands."),
        ("/system", "Write the system message after it: /system TEXT"),
    ],
)
def test_unknown_command_is_said_to_be_one(line: str, said: str) -> None:
    assert commands(line) == [said]


def test_help_names_every_command() -> None:
    assert "\n".join(commands("/help")) == HELP
    assert all(name in HELP for name in ("/reset", "/system", "/help", "/quit", "Ctrl-C"))


@pytest.mark.parametrize("model", ["second", None])
def test_greeting_names_the_model_and_the_help(model: str | None) -> None:
    out = io.StringIO()
    with serving(talkative) as seen:
        converse(options(seen.url, model=model), iter(()), out, greet=True)
    greeting = f"{model or 'first'} at {seen.url}; /help lists commands, Ctrl-D leaves\n"
    assert out.getvalue() == greeting


def refusing(path, body):
    message = "the prompt has 9 tokens and the context 8"
    return 400, json.dumps({"error": {"message": message}}).encode()


def test_refused_question_is_forgotten_and_the_conversation_goes_on() -> None:
    out = io.StringIO()
    with serving(refusing) as seen:
        assert converse(options(seen.url, model="m"), iter(["a", "b"]), out, greet=False) == 1
    assert [len(body["messages"]) for body in seen.bodies] == [1, 1]
    assert out.getvalue().count("400: the prompt has 9 tokens and the context 8\n") == 2


def test_error_in_the_stream_keeps_what_came_before_on_the_screen() -> None:
    out = io.StringIO()

    def failing(path, body):
        return 200, events(delta(content="half"), {"error": {"message": "engine died"}}, done=False)

    with serving(failing) as seen, pytest.raises(Refused, match="engine died"):
        ask(options(seen.url, model="m"), "a", out)
    assert out.getvalue() == "half\n"


@pytest.mark.parametrize(
    ("model", "reply", "error", "words"),
    [
        ("m", refusing("", None), Refused, "9 tokens"),
        (None, (401, b'{"error": {"message": "key needed"}}'), Refused,
         "key needed; give the key with"),
        (None, (200, b'{"data": []}'), CommandError, "lists no model"),
        ("m", (200, events(delta(content="half"), done=False)), CommandError,
         "broke off the answer"),
        ("m", (404, b"<html>"), CommandError, "answered 404; is this a Ropewalk or OpenAI server"),
        ("m", (500, b"[]"), CommandError, "answered 500; is this"),
    ],
)  # fmt: skip
def test_what_a_question_gets_instead_of_an_answer_is_said(model, reply, error, words) -> None:
    with serving(lambda path, body: reply) as seen, pytest.raises(error, match=words):
        ask(options(seen.url, model=model), "a", io.StringIO())


def test_no_server_names_the_next_step() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(CommandError, match=f"no answer from {url}.*ropewalk serve"):
            Client(options(url)).first_model()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_address_may_end_in_v1(suffix: str) -> None:
    with serving(talkative) as seen:
        assert Client(options(seen.url + suffix)).first_model() == "first"
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


def test_thoughts_are_faint_on_a_terminal_and_nowhere_else() -> None:
    def thinking(path, body):
        if path == "/v1/models":
            return talkative(path, body)
        thoughts = [delta(reasoning_content=each) for each in ("They said ", "hello.")]
        return 200, events(*thoughts, delta(content="Hello!"))

    with serving(thinking) as seen:
        for out, shown in (
            (Terminal(), "\x1b[2mThey said hello.\n\x1b[0mHello!\n"),
            (io.StringIO(), "Hello!\n"),
        ):
            ask(options(seen.url), "hello", out)
            assert out.getvalue() == shown


def test_an_answer_that_is_cut_off_is_said_to_be(capsys) -> None:
    def cut(path, body):
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        return talkative(path, body) if "models" in path else (200, events(last))

    with serving(cut) as seen:
        ask(options(seen.url), "hello", io.StringIO())
    assert "--max-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "tries"), [({}, [512, None]), ({"max_tokens": 9}, [9])])
def test_the_usual_length_is_less_where_less_fits(asked, tries) -> None:
    def full(path, body):
        if path == "/v1/models" or "max_tokens" not in body:
            return talkative(path, body)
        error = {"code": "context_length_exceeded", "message": "too long"}
        return 400, json.dumps({"error": error}).encode()

    with serving(full) as seen:
        if asked:
            with pytest.raises(Refused, match="too long"):
                ask(options(seen.url, sampling=asked), "hello", io.StringIO())
        else:
            ask(options(seen.url, sampling=asked), "hello", io.StringIO())
    assert [body.get("max_tokens") for body in seen.bodies[1:]] == tries


@pytest.mark.parametrize(
    ("entries", "asked"),
    [
        ([{"id": "a", "chat": False}, {"id": "b", "chat": True}], "b"),
        ([{"id": "a", "status": {"value": "unloaded"}}, {"id": "b", "chat": True}], "b"),
        ([{"id": "a", "status": {"value": "unloaded"}}, {"id": "b", "chat": False}], "a"),
        ([{"id": "a", "chat": False}], None),
    ],
)
def test_a_model_that_can_chat_is_asked(entries, asked) -> None:
    def listing(path, body):
        listed = 200, json.dumps({"data": entries}).encode()
        return listed if path == "/v1/models" else talkative(path, body)

    with serving(listing) as seen:
        if asked is None:
            with pytest.raises(CommandError, match="chat template"):
                ask(options(seen.url), "hello", io.StringIO())
        else:
            ask(options(seen.url), "hello", io.StringIO())
            assert seen.bodies[1]["model"] == asked


def test_stats() -> None:
    out = io.StringIO()
    with serving(talkative) as seen:
        ask(options(seen.url, stats=True), "hello", out)
    assert out.getvalue().splitlines()[1].startswith("(3 tokens, first after ")
    timed = Answer(text="x", finish="stop", tokens=11, first_s=0.25, total_s=2.25)
    assert stats_line(timed) == "11 tokens, first after 250 ms, 5.0 tokens/s"
    assert stats_line(Answer(finish="stop", tokens=1)) == "1 token, stop"
    stopped = Answer(text="x", finish="interrupted", first_s=0.25, total_s=2.25)
    assert stats_line(stopped) == "interrupted, first after 250 ms"


@pytest.fixture
def keyboard():
    """Keys as a terminal sends them."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def test_ctrl_c_clears_a_line_and_leaves_from_an_empty_one(keyboard, tmp_path) -> None:
    keyboard.send_text("half typed\x03whole\r\x03never\r")
    assert list(typed_lines(tmp_path / "history")) == ["whole"]


def test_ctrl_d_leaves(keyboard, tmp_path) -> None:
    keyboard.send_text("one\rtwo\r\x04never\r")
    assert list(typed_lines(tmp_path / "history")) == ["one", "two"]


def test_pasted_lines_are_one_question(keyboard, tmp_path) -> None:
    keyboard.send_text("\x1b[200~first\r\nsecond\nthird\x1b[201~\r\x04")
    assert list(typed_lines(tmp_path / "history")) == ["first\nsecond\nthird"]


def test_history_lasts_and_is_private(keyboard, tmp_path) -> None:
    file = tmp_path / "new" / "history"
    keyboard.send_text("une question\u00a0?\r\x04")
    list(typed_lines(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    keyboard.send_text("\x1b[A\r\x04")  # the line above
    assert list(typed_lines(file)) == ["une question\u00a0?"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_on_a_full_disk_loses_lines_and_nothing_else(keyboard, tmp_path, monkeypatch):
    def full(history, string):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileHistory, "store_string", full)
    keyboard.send_text("one\rtwo\r\x04")
    assert list(typed_lines(tmp_path / "history")) == ["one", "two"]


def test_a_conversation_needs_no_history(keyboard, tmp_path) -> None:
    (tmp_path / "file").touch()
    lines = typed_lines(tmp_path / "file" / "history")
    keyboard.send_text("one\r")
    assert next(lines) == "one"
    keyboard.send_text("\x1b[A!\r")
    assert next(lines) == "one!"
