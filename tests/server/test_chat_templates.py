"""A chat template that does not end or takes all memory: one error for its chat, nobody else."""

import threading
import time

import httpx
import pytest

from model.tokenizers.chat import ChatTemplate
from server import prepare
from tests.model.tokenizers.test_chat_process import DOUBLE, EITHER, LOOP
from tests.server.test_app import error_of
from tests.server.toy import ask, chat, running, sample, toy, toy_app

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
    monkeypatch.setattr(prepare, "RENDER_SECONDS", 0.0)
    app = toy_app(served=[toy(chat_template=ChatTemplate(LOOP, {}))])
    answer = chat(app)
    error = error_of(answer, 429)
    assert error["code"] == "queue_full" and int(answer.headers["retry-after"]) > 0
    counted = {
        "model_name": "toy",
        "encoding": "rope",
        "reason": "queue_full",
        "code": "queue_full",
    }
    assert sample(app.state.metrics, "request_rejections_total", **counted) == 1
