"""What the log says of requests: a line for each, why it was refused, and never a text."""

import asyncio
import logging

import pytest

from ropewalk.model.chat.template import ChatTemplate
from ropewalk.server.errors import QueueFull, RequestFailed, Unauthorized, WrongHost
from ropewalk.server.http.access_log import REFUSALS_PER_SECOND, Exchange, HttpLog
from ropewalk.server.metrics.exporter import Metrics
from tests.server.sockets import completion, connect, exchange, post, read_all
from tests.server.toy import (
    UNMATCHED,
    ScriptedEngine,
    ask,
    chat,
    complete,
    rejected,
    running,
    sample,
    toy,
    toy_app,
    wait_for,
)

SECRET = "my-secret-text"


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def lines(caplog, level: int = logging.INFO) -> list[str]:
    """What the server said of requests at that level or above."""
    records = [each for each in caplog.records if each.name == "ropewalk.http"]
    return [each.getMessage() for each in records if each.levelno >= level]


def test_every_request_has_a_line(caplog):
    app = toy_app()
    response = complete(app, max_tokens=3)
    (line,) = lines(caplog)
    assert line.startswith("POST /v1/completions 200, 0.")
    size = len(response.content)
    assert line.endswith(f" s, {size} bytes, 127.0.0.1, {response.headers['x-request-id']}")
    (record,) = (each for each in caplog.records if each.name == "ropewalk.http")
    assert record.levelno == logging.INFO
    assert record.fields | {"seconds": 0} == {
        "request_id": response.headers["x-request-id"],
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "route": "/v1/completions",
        "status": 200,
        "seconds": 0,
        "bytes": size,
    }


def test_a_stream_has_one_when_it_has_ended(caplog):
    response = complete(toy_app(), max_tokens=3, stream=True)
    (line,) = lines(caplog)
    assert " 200, 0.0" in line and f" {len(response.content)} bytes" in line


def test_probes_have_one_only_for_whoever_debugs(caplog):
    app = toy_app()
    paths = ("/health", "/health/live/", "/health/ready", "/metrics")
    for path in paths:
        assert ask(app, "GET", path).status_code == 200
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG, "ropewalk.http")
    for path in paths:
        ask(app, "GET", path)
    assert len(lines(caplog, logging.DEBUG)) == len(paths)


def test_a_probe_that_fails_has_one(caplog):
    engine = ScriptedEngine()
    engine.unsound = "cached blocks changed"
    ask(toy_app(engine), "GET", "/health/ready")
    (line,) = lines(caplog)
    assert line.startswith("GET /health/ready 503") and line.endswith(
        ": not_ready: cached blocks changed"
    )


def test_without_an_access_log_only_refusals_have_one(caplog):
    app = toy_app(access_log=False)
    complete(app)
    assert lines(caplog) == []
    complete(app, temperature=9)
    (line,) = lines(caplog)
    assert "POST /v1/completions 400" in line
    caplog.set_level(logging.DEBUG, "ropewalk.http")
    complete(app)
    assert len(lines(caplog, logging.DEBUG)) == 2


@pytest.mark.parametrize(
    ("body", "path", "said"),
    [
        ({"temperature": 9}, "completions", "invalid_value (temperature): temperature should"),
        ({"zz": 1}, "completions", "unknown_parameter (zz): 'zz' is not a parameter"),
        ({"max_tokens": 600}, "completions", "context_length_exceeded (max_tokens): "),
        ({"model": "gpt"}, "completions", "model_not_found (model): model 'gpt' does not"),
        (
            {"messages": [{"role": "x", "content": "a"}]},
            "chat/completions",
            " (messages[0].role): ",
        ),
        ({}, "nothing", "not_found: there is nothing at this path"),
    ],
)
def test_a_refusal_names_path_field_and_reason(body, path, said, caplog):
    body = body if "messages" in body else {"prompt": "a"} | body
    response = ask(toy_app(), "POST", f"/v1/{path}", json=body)
    assert response.status_code in (400, 404)
    (line,) = lines(caplog)
    assert line.startswith(f"POST /v1/{path} {response.status_code}, ")
    assert response.headers["x-request-id"] in line
    assert said in line


def test_a_refusal_of_the_engine_or_the_middleware_has_one_too(caplog):
    engine = ScriptedEngine(refuse=QueueFull("too many wait"))
    complete(toy_app(engine))
    engine = ScriptedEngine(failure_at=(1, RequestFailed("logits are not finite")))
    complete(toy_app(engine))
    ask(toy_app(api_keys=frozenset({"k"})), "GET", "/v1/models/")
    full, failed, keyless = (line for line in lines(caplog) if line.startswith(("GET", "POST")))
    assert "429" in full and full.endswith(": queue_full: too many wait")
    assert "500" in failed and failed.endswith(": internal_error: logits are not finite")
    assert "GET /v1/models/ 401" in keyless and "invalid_api_key" in keyless


def secretive(**body) -> dict:
    return {"model": "toy", "prompt": SECRET, "max_tokens": 3} | body


TALK = [{"role": "user", "content": SECRET}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", secretive()),
        ("/v1/completions", secretive(stream=True)),
        ("/v1/completions", secretive(prompt=[SECRET, 1])),
        ("/v1/completions", secretive(prompt={"a": SECRET})),
        ("/v1/completions", secretive(prompt=SECRET * 1000)),
        ("/v1/completions", secretive(stop=[SECRET] * 50)),
        ("/v1/completions", secretive(temperature=SECRET)),
        ("/v1/completions", secretive(suffix=SECRET)),
        ("/v1/completions", secretive(user=[SECRET])),
        ("/v1/completions", secretive(cache_salt=[SECRET])),
        ("/v1/completions", secretive(logit_bias={SECRET: 1})),
        ("/v1/completions", secretive(guided_regex=SECRET)),
        ("/v1/chat/completions", {"messages": TALK, "response_format": {"type": SECRET}}),
        ("/v1/chat/completions", {"messages": SECRET}),
        ("/v1/chat/completions", {"messages": TALK, "n": 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"text": SECRET}]}]}),
        ("/tokenize", {"prompt": SECRET, "text": SECRET}),
        ("/tokenize", {"prompt": [SECRET]}),
        ("/detokenize", {"tokens": [SECRET]}),
        ("/detokenize", {"tokens": SECRET}),
    ],
)
def test_no_line_has_a_text(path, body, caplog):
    caplog.set_level(logging.DEBUG, "ropewalk.server")
    ask(toy_app(), "POST", path, json=body)
    assert len(lines(caplog)) == 1
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such role: ' + messages[0].content) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content | int / 0 }}",
    ],
)
def test_nor_has_one_that_a_chat_template_refuses(template, caplog):
    app = toy_app(served=[toy(chat_template=ChatTemplate(template, {}))])
    response = chat(app, messages=TALK)
    assert response.status_code == 400
    (line,) = lines(caplog)
    assert line.endswith(": invalid_value (messages)")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("path", ["/no%0Awhere", "/%1b[31m", "/%E2%80%A8", "/\u2028", "/a b"])
def test_nothing_that_a_client_sends_makes_a_line_of_its_own(path, caplog):
    app = toy_app(allowed_hosts=frozenset({"toy"}))
    ask(app, "GET", path, headers={"host": "toy"})
    ask(app, "GET", path, headers={"host": b"a\x85b\xff"})
    complete(app, model="a\nb\u2028c", **{"x\r\ny": 1})
    ask(app, "POST", "/v1/completions", json={"prompt": "a", "x\r\ny": 1}, headers={"host": "toy"})
    found = lines(caplog)
    assert len(found) == 4
    for line in found:
        assert line.isprintable()


def test_a_long_path_is_cut(caplog):
    ask(toy_app(), "GET", "/" + "x" * 4000)
    (line,) = lines(caplog)
    assert len(line) < 500


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"NONSENSE\r\n\r\n", "- - 400, "),
        (b"GET me HTTP/1.1\r\nhost: toy\r\n\r\n", "GET me 400, 0.000 s, 1"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: toy\r\n\r\n", "GET /aaaa"),
    ],
)
def test_what_is_no_request_has_a_line_and_is_counted(data, said, caplog):
    app = toy_app()
    with running(app) as (url, _):
        raw = exchange(url, data)
    (line,) = lines(caplog)
    assert said in line
    (shown,) = [part for part in raw.split(b"\r\n") if part.startswith(b"x-request-id")]
    assert shown.split()[-1].decode() in line
    code = "headers_too_large" if "aaaa" in said else "bad_request"
    assert f"{code}: " in line
    assert rejected(app, "invalid_request", code, UNMATCHED) == 1


def test_a_body_that_is_no_body_belongs_to_its_request(caplog):
    head = post("/v1/completions", {}, transfer_encoding="chunked").partition(b"\r\n\r\n")[0]
    head = b"\r\n".join(each for each in head.split(b"\r\n") if b"length" not in each)
    app = toy_app()
    with running(app) as (url, _):
        raw = exchange(url, head + b"\r\n\r\nnonsense\r\n")
    assert b"400 Bad Request" in raw
    (line,) = lines(caplog)
    assert line.startswith("POST /v1/completions 400, ") and "bad_request" in line
    (shown,) = [part for part in raw.split(b"\r\n") if part.startswith(b"x-request-id")]
    assert shown.split()[-1].decode() in line
    labels = {"route": "/v1/completions", "method": "POST", "status": "400"}
    assert sample(app.state.metrics, "http_requests_total", **labels) == 1


def test_a_connection_that_asks_nothing_has_none(caplog, monkeypatch):
    monkeypatch.setattr("ropewalk.server.http.protocol.Protocol.head_seconds", 0.1)
    app = toy_app()
    with running(app) as (url, _), connect(url) as client:
        assert b"408 " in read_all(client)
    assert lines(caplog) == []


def test_a_client_that_leaves_before_its_answer_has_one(caplog):
    engine = ScriptedEngine(pause=0.02)
    app = toy_app(engine)
    with running(app) as (url, _):
        with connect(url) as client:
            client.sendall(completion(max_tokens=400))
            wait_for(lambda: engine.live == 1)
        wait_for(lambda: lines(caplog) != [])
    (line,) = lines(caplog)
    assert line.startswith("POST /v1/completions not answered, ")
    labels = {"route": "/v1/completions", "method": "POST", "status": "none"}
    assert sample(app.state.metrics, "http_requests_total", **labels) == 1


def made(clock) -> HttpLog:
    return HttpLog(Metrics(), access_log=True, clock=clock)


EXCHANGE = Exchange("id", "127.0.0.1", "GET", "/x", None, 401, 0.1, 10)


def test_a_flood_is_summed_up_and_nothing_else_is_lost(caplog):
    """10,000 without a key in a second, and one of another kind among them."""
    app = toy_app(api_keys=frozenset({"k"}))
    log = HttpLog(app.state.metrics, access_log=True, clock=lambda: 5.0)

    async def flood():
        for index in range(10_000):
            log.refused(EXCHANGE, Unauthorized("no key"))
            if index == 9_000:
                log.refused(EXCHANGE, WrongHost("no such host"))
        log.close()

    asyncio.run(flood())
    found = lines(caplog)
    assert len(found) == REFUSALS_PER_SECOND + 2
    assert sum("wrong_host" in line for line in found) == 1
    left_out = 10_000 - REFUSALS_PER_SECOND
    assert found[-1].endswith(f"within a second: {left_out} invalid_api_key")
    assert caplog.records[-1].fields == {"refused": {"invalid_api_key": left_out}}
    assert rejected(app, "unauthorized", "invalid_api_key", UNMATCHED) == 10_000


def test_the_next_second_is_shown_again(caplog):
    now = [5.0]
    log = made(lambda: now[0])

    async def seconds():
        for second in range(3):
            now[0] = 5.0 + second
            for _ in range(REFUSALS_PER_SECOND + second):
                log.refused(EXCHANGE, Unauthorized("no key"))
        log.close()

    asyncio.run(seconds())
    summed = [line for line in lines(caplog) if "more requests" in line]
    assert [line.split()[0] for line in summed] == ["1", "2"]
    assert len(lines(caplog)) == 3 * REFUSALS_PER_SECOND + 2


def test_what_was_left_out_is_said_when_the_flood_has_ended(caplog):
    async def flood():
        log = HttpLog(Metrics(), access_log=True)
        for _ in range(REFUSALS_PER_SECOND + 5):
            log.refused(EXCHANGE, Unauthorized("no key"))
        await asyncio.sleep(1.1)

    asyncio.run(flood())
    assert lines(caplog)[-1].startswith("5 more requests were refused within a second")


def test_a_server_that_stops_says_it_too(caplog):
    with running(toy_app(api_keys=frozenset({"k"}))) as (url, _):
        for _ in range(REFUSALS_PER_SECOND + 3):
            exchange(url, b"GET /version HTTP/1.1\r\nhost: toy\r\nconnection: close\r\n\r\n")
    assert sum("GET /version 401" in line for line in lines(caplog)) >= REFUSALS_PER_SECOND
    shown = sum("GET /version 401" in line for line in lines(caplog))
    summed = sum(int(line.split()[0]) for line in lines(caplog) if "more requests" in line)
    assert shown + summed == REFUSALS_PER_SECOND + 3
