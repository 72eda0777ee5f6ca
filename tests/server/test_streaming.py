"""Clients that leave, stall or wait, and requests that take too long."""

import asyncio
import json
import logging
import threading

import pytest

from ropewalk.server.http.streaming import Drain, EventStream, Lifeline
from ropewalk.server.scheduling.request import FinishReason
from tests.server.sockets import (
    answered,
    completion,
    connect,
    exchange,
    post,
    read_all,
    read_until,
    wait_until_idle,
)
from tests.server.toy import LABELS, ScriptedEngine, running, sample, toy, toy_app, wait_for


def disconnects(app) -> float:
    return sample(app.state.metrics, "client_disconnects_total", **LABELS)


@pytest.mark.parametrize(
    ("stream", "n", "pause"),
    [(False, 1, 0.02), (True, 1, 0.02), (False, 3, 0.02), (True, 3, 0.02), (True, 1, 30)],
)
def test_a_client_that_leaves_is_aborted_and_counted(stream, n, pause):
    engine = ScriptedEngine(pause=pause)
    app = toy_app(engine)
    with running(app) as (url, server):
        with connect(url) as client:
            client.sendall(completion(max_tokens=400, stream=stream, n=n))
            wait_for(lambda: engine.live == n)
            if stream and pause < 1:  # else it leaves before its first token
                read_until(client, b"data: ")
        wait_until_idle(engine)
        assert len(engine.aborted) == n
        assert all(request.abort_as is FinishReason.ABORT for request in engine.aborted)
        wait_for(lambda: disconnects(app) == 1)
        wait_for(lambda: not server.server_state.tasks)
        assert app.state.drain.in_flight == 0 and not app.state.drain.lifelines


def test_a_client_that_leaves_while_sending_its_body(caplog):
    app = toy_app()
    with running(app) as (url, server):
        with connect(url) as client:
            client.sendall(completion()[:-5])
            wait_for(lambda: server.server_state.tasks)
        wait_for(lambda: not server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_complete_answers_are_no_disconnects():
    app = toy_app()
    with running(app) as (url, _):
        with connect(url) as client:
            client.sendall(completion(stream=True, max_tokens=3))
            read_until(client, b"[DONE]\n\n\r\n0\r\n\r\n")
        with connect(url) as client:
            client.sendall(completion(max_tokens=3))
            read_until(client, b"}}")
    assert disconnects(app) == 0


def test_a_reader_that_stops_is_aborted_and_its_connection_dropped():
    # Every token is a chunk of some 10 kB, so that socket buffers fill at once.
    engine = ScriptedEngine()
    app = toy_app(engine, served=[toy("x" * 10_000)], stalled_write_s=0.3, ping_s=0.1)
    with running(app) as (url, server), connect(url, receive_buffer=4096) as client:
        client.sendall(post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 500}))
        wait_for(lambda: engine.live == 1)
        wait_until_idle(engine)
        assert len(engine.aborted) == 1
        wait_for(lambda: not server.server_state.connections)
        wait_for(lambda: not server.server_state.tasks)
        assert b"[DONE]" not in read_all(client)
    labels = {"model_name": "x" * 10_000, "encoding": "rope"}
    assert sample(app.state.metrics, "client_disconnects_total", **labels) == 1


def test_a_slow_reader_gets_everything():
    app = toy_app(served=[toy("x" * 10_000)], stalled_write_s=5.0)
    with running(app) as (url, _), connect(url, receive_buffer=4096) as client:
        client.sendall(post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 100}))
        threading.Event().wait(0.3)
        assert read_until(client, b"[DONE]").count(b"data: ") == 101


def test_pings_while_nothing_comes():
    engine = ScriptedEngine(pause=0.35)
    app = toy_app(engine, ping_s=0.1)
    with running(app) as (url, _), connect(url) as client:
        client.sendall(completion(stream=True, max_tokens=3))
        text = read_until(client, b"[DONE]")
    first = text.index(b"data: ")
    assert b": ping" not in text[:first]  # nothing is sent before there is a status
    assert 4 <= text.count(b": ping\n\n") <= 8
    assert text.count(b"data: ") == 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_first_token_that_takes_long_is_awaited_with_pings(fails):
    """So that no proxy takes a long prompt's stream for dead; errors are events from then on."""
    engine = ScriptedEngine(pause=0.35)
    app = toy_app(engine, first_ping_s=0.1, ping_s=0.1, request_timeout_s=0.3 if fails else 9.0)
    with running(app) as (url, _), connect(url) as client:
        client.sendall(completion(stream=True, max_tokens=3))
        text = read_until(client, b"}\n\n" if fails else b"[DONE]")
    head, _, body = text.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and head.count(b"HTTP/1.1") == 1
    assert 2 <= body[: body.index(b"data: ")].count(b": ping\n\n") <= 3
    if fails:
        assert last_event(text)["error"]["code"] == "deadline_exceeded"
    else:
        assert body.count(b"data: ") == 4


def test_headers_come_first_however_long_they_wait():
    """They wait while an earlier answer fills the connection."""
    asyncio.run(_blocked_headers())


async def _blocked_headers():
    sent, free = [], asyncio.Event()

    async def send(message):
        await free.wait()
        sent.append(message.get("body", message["type"]))

    out = EventStream(send, Lifeline(None, 9.0, Drain()), ping=b"P", ping_s=0.01, stalled_s=9.0)
    out.begin_within(0.01)
    await asyncio.sleep(0.1)
    writing = asyncio.create_task(out.finish(b"all"))
    await asyncio.sleep(0.05)
    assert not out.started  # an error would still have a status
    free.set()
    await writing
    await asyncio.sleep(0.05)
    assert sent == ["http.response.start", b"P", b"all"]


def test_no_ping_while_tokens_flow():
    engine = ScriptedEngine(pause=0.01)
    app = toy_app(engine, ping_s=0.5)
    with running(app) as (url, _), connect(url) as client:
        client.sendall(completion(stream=True, max_tokens=100))
        assert b": ping" not in read_until(client, b"[DONE]")


def last_event(raw: bytes) -> dict:
    line = [line for line in raw.split(b"\n") if line.startswith(b"data: ")][-1]
    return json.loads(line[6:])


def test_the_deadline_before_and_after_the_first_byte():
    engine = ScriptedEngine(pause=0.15)
    app = toy_app(engine, request_timeout_s=0.4)
    with running(app) as (url, _):
        whole = exchange(url, completion(max_tokens=100, stream=False, n=2).replace(
            b"host: toy", b"host: toy\r\nconnection: close"
        ))  # fmt: skip
        assert b"504 Gateway Timeout" in whole and b"deadline_exceeded" in whole
        with connect(url) as client:
            client.sendall(completion(max_tokens=100, stream=True))
            raw = read_until(client, b"0\r\n\r\n")
        assert last_event(raw)["error"]["code"] == "deadline_exceeded"
        assert b"[DONE]" not in raw
        wait_until_idle(engine)
    assert disconnects(app) == 0
    assert sample(app.state.metrics, "stream_errors_total", **LABELS) == 1


def test_headers_wait_for_the_first_token():
    engine = ScriptedEngine(pause=0.3)
    with running(toy_app(engine)) as (url, _), connect(url) as client:
        client.sendall(completion(stream=True, max_tokens=2))
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(10)
        assert b"200 OK" in read_until(client, b"[DONE]")


def test_the_lifespan_starts_and_stops_the_engine():
    engine = ScriptedEngine()
    with running(toy_app(engine)):
        assert engine.started
    assert not engine.started


def test_refusals_close_nothing_they_need_not():
    with running(toy_app(api_keys=frozenset({"k"}))) as (url, _), connect(url) as client:
        for _ in range(2):  # on one connection
            assert b"401 Unauthorized" in answered(client, completion())
