"""Stopping: the listener stays open, streams end as if nothing happened, and the exit is clean."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.server.sockets import (
    completion,
    connect,
    exchange,
    free_port,
    read_all,
    read_until,
    response,
)
from tests.server.toy import ScriptedEngine, running, toy_app, wait_for

CLOSE = b"host: toy\r\nconnection: close"


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\n".encode() + CLOSE + b"\r\n\r\n"


def texts(raw: bytes) -> str:
    lines = [line for line in raw.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
    return "".join(choice["text"] for choice in choices)


def test_running_streams_finish_and_new_requests_are_refused():
    engine = ScriptedEngine(pause=0.02)
    with running(toy_app(engine)) as (url, server):
        with connect(url) as client:
            client.sendall(completion(stream=True, max_tokens=40))
            control = texts(read_until(client, b"[DONE]"))
        clients = [connect(url) for _ in range(8)]
        for client in clients:
            client.sendall(completion(stream=True, max_tokens=40))
        wait_for(lambda: engine.live == 8)
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: server._drain.draining)
        start = time.monotonic()
        status, headers, _ = response(exchange(url, completion()))
        assert (status, headers["connection"]) == (503, "close")
        assert 1 <= int(headers["retry-after"]) <= 5  # the drain's own limit
        assert time.monotonic() - start < 1
        assert response(exchange(url, get("/health/ready")))[0] == 503
        assert response(exchange(url, get("/health/live")))[0] == 200
        for client in clients:
            assert texts(read_until(client, b"[DONE]")) == control
            client.close()
        wait_for(lambda: server.should_exit)


@pytest.mark.parametrize(
    ("limit", "signals"), [(0.5, [signal.SIGTERM]), (60, [signal.SIGTERM, signal.SIGINT])]
)
def test_streams_over_the_limit_or_a_second_signal_get_an_error_frame(limit, signals):
    engine = ScriptedEngine(pause=0.05)
    with running(toy_app(engine), drain_seconds=limit) as (url, server), connect(url) as client:
        client.sendall(completion(stream=True, max_tokens=400))
        wait_for(lambda: engine.live == 1)
        for number in signals:
            server.handle_exit(number, None)
            wait_for(lambda: server._drain.draining)
        start = time.monotonic()
        raw = read_all(client)
        assert time.monotonic() - start < 5
        assert b"shutting_down" in raw and b"[DONE]" not in raw
        assert len(engine.aborted) == 1


def test_bodies_that_come_after_the_cut_or_never_are_answered():
    engine = ScriptedEngine()
    head, _, body = completion(stream=True).partition(b"\r\n\r\n")
    with (
        running(toy_app(engine), drain_seconds=60) as (url, server),
        connect(url) as late,
        connect(url) as never,
    ):
        for client in (late, never):
            client.sendall(head + b"\r\n\r\n" + body[:-1])
        wait_for(lambda: server._drain.in_flight == 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.handle_exit(number, None)
        wait_for(lambda: server._drain.over)
        late.sendall(body[-1:])
        for client in (late, never):
            status, headers, answer = response(read_all(client))
            assert (status, headers["content-type"]) == (503, "application/json")
            assert json.loads(answer)["error"]["code"] == "shutting_down"
    assert engine.requests == []


PROGRAM = """
    import sys
    from ropewalk.server.http.protocol import Server, uvicorn_config
    from tests.server.toy import ScriptedEngine, toy_app

    engine = ScriptedEngine(pause=0.02)
    app = toy_app(engine)
    config = uvicorn_config(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False)
    Server(config, app.state.drain, 10.0).run()
    print("stopped cleanly", flush=True)
"""


@contextlib.contextmanager
def started(*before: str):
    """A server in a process of its own, started by the command `before`, if any: (URL, process)."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*before, sys.executable, "-c", textwrap.dedent(PROGRAM), str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    try:
        wait_for(lambda: answers(url), seconds=60)
        yield url, process
    finally:
        process.kill()
        process.communicate()


# test_end_to_end.py shows it of a server with a model.
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM], marks=pytest.mark.full),
        pytest.param([signal.SIGINT], marks=pytest.mark.full),
        pytest.param([signal.SIGHUP], marks=pytest.mark.full),
        [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM],  # as when a terminal closes
    ],
)
def test_a_signal_ends_the_process_with_0_after_its_last_stream(signals):
    with started() as (url, process):
        with connect(url) as client:
            client.sendall(completion(stream=True, max_tokens=30))
            read_until(client, b"data: ")
            for number in signals:
                process.send_signal(number)
                time.sleep(0.05)
            assert b"[DONE]" in read_until(client, b"[DONE]")
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert "stopped cleanly" in output and "Traceback" not in output


def test_a_server_under_nohup_does_not_mind_a_hangup():
    with started("nohup") as (url, process):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert answers(url)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output


def answers(url: str) -> bool:
    try:
        return response(exchange(url, get("/health/ready")))[0] == 200
    except ConnectionRefusedError:
        return False


def test_an_idle_server_stops_within_a_second():
    before = threading.active_count()
    with running(toy_app()) as (url, server):
        assert answers(url)
        start = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: threading.active_count() <= before)
        assert time.monotonic() - start < 3
