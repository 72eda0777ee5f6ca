"""More connections than descriptors: idle ones make room, new ones wait, the log stays short."""

import contextlib
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import textwrap
import time

import pytest

from ropewalk.server import listen
from ropewalk.server.http import door, protocol
from tests.server.certificates import self_signed
from tests.server.sockets import completion, connect, free_port, read_all, read_until
from tests.server.toy import ScriptedEngine, running, toy_app, wait_for

HEALTH = b"GET /health HTTP/1.1\r\nhost: toy\r\n\r\n"
LIMIT = 8


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(protocol, "max_connections", lambda: LIMIT)


def served(client: socket.socket) -> bool:
    client.sendall(HEALTH)
    return b"200 OK" in read_until(client, b"}")


def closed(client: socket.socket) -> bool:
    return read_all(client) == b""


def test_the_longest_idle_connection_is_closed_for_a_new_one(few, caplog):
    with running(toy_app()) as (url, server), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(url)) for _ in range(LIMIT)]
        assert all(served(client) for client in clients)
        assert not messages(caplog)  # as long as nobody waits
        assert served(clients[0])  # now the second has been idle for longest
        for number in range(1, 4):
            clients.append(stack.enter_context(connect(url)))
            assert served(clients[-1])
            assert closed(clients[number])
        assert served(clients[0])
        assert len(server.server_state.connections) == LIMIT
    assert len(messages(caplog)) == 1  # of the same second


def test_as_many_at_once_as_there_are_places_close_nobody(few, caplog):
    with running(toy_app()) as (url, server):
        for number in range(60):  # some are handed over just as the last one comes
            with contextlib.ExitStack() as stack:
                clients = []
                for _ in range(LIMIT):
                    clients.append(stack.enter_context(connect(url)))
                    time.sleep(number * 5e-6)
                assert all(served(client) for client in clients)
            wait_for(lambda: not server.server_state.connections)
    assert not messages(caplog)


def messages(caplog) -> list[str]:
    return [
        record.message for record in caplog.records if "connections are in use" in record.message
    ]


def test_silent_connections_keep_nobody_out(few):
    with running(toy_app()) as (url, server), contextlib.ExitStack() as stack:
        for _ in range(5 * LIMIT):
            stack.enter_context(connect(url))
        for _ in range(3):
            with connect(url) as client:
                assert served(client)
        assert len(server.server_state.connections) <= LIMIT


def test_connections_at_work_are_never_closed_and_new_ones_wait(few, caplog):
    engine = ScriptedEngine(pause=0.02)
    with running(toy_app(engine)) as (url, _), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(url)) for _ in range(LIMIT)]
        for number, client in enumerate(busy[1:]):
            client.sendall(completion(max_tokens=25 + 5 * number, stream=True))
        busy[0].sendall(HEALTH[:9])  # a part of a request is no idleness either
        wait_for(lambda: engine.live == LIMIT - 1)
        late = stack.enter_context(connect(url))
        assert served(late)  # once the first is done
        assert engine.live < LIMIT - 1
        for client in busy[1:]:
            assert b"[DONE]" in read_until(client, b"[DONE]")
        busy[0].sendall(HEALTH[9:])
        assert b"200 OK" in read_until(busy[0], b"}")
    assert any("new ones wait" in message for message in messages(caplog))


def test_an_answer_that_is_still_being_sent_is_no_idleness(few):
    """Its client may be slow."""
    app = toy_app()
    with running(app) as (url, server), connect(url, receive_buffer=4096) as client:
        wait_for(lambda: server.server_state.connections)
        (connection,) = server.server_state.connections
        assert connection.idle_since is not None
        connection.transport.get_write_buffer_size = lambda: 1
        assert connection.idle_since is None
        assert served(client)


def test_tls_handshakes_that_do_not_come_keep_nobody_out_for_long(
    few, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    certificate, key = self_signed(tmp_path, "DNS:localhost")
    trusting = ssl.create_default_context(cafile=certificate)
    tls = listen.tls_context(certificate, key)
    with running(toy_app(), tls=tls) as (url, _), contextlib.ExitStack() as stack:
        for number in range(2 * LIMIT):
            silent = stack.enter_context(connect(url))
            if number % 2:
                silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with trusting.wrap_socket(connect(url), server_hostname="localhost") as client:
            assert served(client)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


PROGRAM = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
    import logging
    from ropewalk.server.http.protocol import Server, uvicorn_config
    from tests.server.toy import ScriptedEngine, toy_app

    logging.basicConfig(level="WARNING")
    app = toy_app(ScriptedEngine())
    config = uvicorn_config(app, host="127.0.0.1", port=int(sys.argv[1]), log_config=None)
    Server(config, app.state.drain, 10.0).run()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


@pytest.mark.parametrize(
    ("soft", "hard"), [pytest.param(256, 256, marks=pytest.mark.full), (64, 400)]
)
def test_a_flood_of_silent_connections_never_takes_the_last_descriptor(soft, hard):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(port), str(soft), str(hard)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        stack.callback(process.communicate)
        stack.callback(process.kill)
        wait_for(lambda: can_connect(url), 60)
        began = time.monotonic()
        for _ in range(2 * hard):
            stack.enter_context(connect(url))
        while time.monotonic() < began + 1.5:
            with connect(url) as client:
                assert served(client)
            time.sleep(0.1)
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < hard
        process.terminate()
        said, logged = process.communicate(timeout=20)
        took = time.monotonic() - began
    assert process.returncode == 0
    assert int(said) == hard
    lines = logged.splitlines()
    assert 1 <= len(lines) <= took + 1, logged
    assert all(re.search("all [0-9]+ connections are in use", line) for line in lines)


def can_connect(url: str) -> bool:
    try:
        connect(url).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 1024, 1024, 896),
        (1024, 4096, 4096, 3968),
        (64, 64, 64, 32),
        (1024, 1 << 30, 8320, 8192),
        (1024, resource.RLIM_INFINITY, 8320, 8192),
        (1 << 20, 1 << 20, 1 << 20, 8192),
    ],
)
def test_the_limit_of_descriptors_is_raised_as_far_as_it_is_of_use(
    monkeypatch, soft, hard, raised, connections
):
    now = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: now.append(limits))
    assert door.max_connections() == connections
    assert now[-1] == (raised, hard)


def test_where_the_limit_cannot_be_raised_it_is_kept_to(monkeypatch):
    def refuse(which, limits):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert door.max_connections() == 128
