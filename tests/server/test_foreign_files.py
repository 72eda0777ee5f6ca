"""Templates that do not end and tokenizers that panic: one error for the chat, nobody else."""

import threading
import time

import httpx
import pytest

from ropewalk.model.chat.template import ChatTemplate
from ropewalk.model.tokenizers.hf import HfTokenizer, read_tokenizer_json
from ropewalk.server.openai import requests
from tests.model.tokenizers.test_chat_process import DOUBLE, EITHER, LOOP
from tests.model.tokenizers.test_foreign_files import PANICS
from tests.server.toy import ask, chat, error_of, rejected, running, toy, toy_app

PANICKING = "a" * 39 + "!"
TALK = [{"role": "user", "content": "loop"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("source", [LOOP + "ok", DOUBLE, "{{ 'a' | center(6000000000) }}"])
def test_the_chat_is_refused(source, path):
    app = toy_app(served=[toy(chat_template=ChatTemplate(source, {}))])
    answer = ask(app, "POST", path, json={"messages": TALK})
    error = error_of(answer, 400)
    assert (error["code"], error["param"]) == ("invalid_value", "messages")
    assert "it used more than" in error["message"] or "it needed more than" in error["message"]
    assert answer.headers["x-request-id"]


def test_nobody_else_notices():
    hostile = toy("hostile", chat_template=ChatTemplate(EITHER, {}))
    app = toy_app(served=[hostile, toy()])
    with running(app) as (url, server), httpx.Client(base_url=url, timeout=20) as client:

        def ask_for(model, content):
            body = {"model": model, "messages": [{"role": "user", "content": content}]}
            return client.post("/v1/chat/completions", json=body | {"max_tokens": 2}).status_code

        ask_for("hostile", "hi"), ask_for("toy", "hi")
        statuses = []
        stuck = threading.Thread(target=lambda: statuses.append(ask_for("hostile", "loop")))
        stuck.start()
        time.sleep(0.05)
        assert client.get("/health").status_code == 200
        assert ask_for("toy", "hi") == ask_for("hostile", "hi") == 200
        assert not statuses, "the stuck chat ended too early to show anything"
        stuck.join()
        assert statuses == [400]
        stuck = threading.Thread(target=lambda: ask_for("hostile", "loop"))
        stuck.start()
        time.sleep(0.05)
        begun = time.monotonic()
        server.should_exit = True  # as SIGTERM does
        stuck.join()
    assert time.monotonic() - begun < 5


def test_waiting_for_others_has_an_end(monkeypatch):
    monkeypatch.setattr(requests, "RENDER_SECONDS", 0.0)
    app = toy_app(served=[toy(chat_template=ChatTemplate(LOOP, {}))])
    answer = chat(app)
    error = error_of(answer, 429)
    assert error["code"] == "queue_full" and int(answer.headers["retry-after"]) > 0
    assert rejected(app, "queue_full", "queue_full") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PANICKING}),
        ("/v1/completions", {"prompt": ["a", PANICKING * 200]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PANICKING}]}),
        ("/tokenize", {"prompt": PANICKING}),
    ],
)
def test_a_tokenizer_s_panic_is_one_counted_error(path, body, capfd):
    tokenizer = HfTokenizer(read_tokenizer_json(PANICS))
    app = toy_app(served=[toy(tokenizer=tokenizer, vocab_size=256, max_context=4096)])
    error = error_of(ask(app, "POST", path, json=body), 400)
    assert error["code"] == "invalid_value" and "fails on this text" in error["message"]
    assert rejected(app, "invalid_request", "invalid_value") == 1
    capfd.readouterr()  # the library writes a trace of its own
