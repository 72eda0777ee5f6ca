"""The log as lines of text or as JSON, from the server's own code and from libraries."""

import json
import logging
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ropewalk.server import terminal
from ropewalk.server.terminal import JsonLines
from tests.server.sockets import exchange, free_port

SERVE = """
    import asyncio, logging, sys, warnings
    from ropewalk.server.http import protocol
    from ropewalk.server.terminal import configure_logs
    from tests.server.toy import toy_app

    async def serve(port):
        app = toy_app()
        config = protocol.uvicorn_config(app, host="127.0.0.1", port=port, log_config=None)
        server = protocol.Server(config, app.state.drain, 1.0)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print("started", flush=True)
        await asyncio.to_thread(input)
        warnings.warn("something old is used")
        try:
            1 / 0
        except ZeroDivisionError:
            logging.getLogger("ropewalk.server.engine.engine").exception("a step failed\\nbadly")
        server.handle_exit(15, None)
        await task

    for form, port in zip(sys.argv[1::2], sys.argv[2::2]):
        logging.root.handlers.clear()
        configure_logs("info", form)
        asyncio.run(serve(int(port)))
        print("---", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def logged() -> list[list[str]]:
    """All on standard error, as JSON and as text, of servers asked a few things and stopped."""
    ports = free_port(), free_port()
    code = textwrap.dedent(SERVE)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "json", str(ports[0]), "text", str(ports[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for port in ports:
        assert process.stdout.readline() == "started\n"
        for path in ("/v1/models/", "/v1/no%0Awhere", "/health"):
            head = f"GET {path} HTTP/1.1\r\nhost: toy\r\nx-request-id: abc\r\n"
            exchange(f"http://127.0.0.1:{port}", f"{head}connection: close\r\n\r\n".encode())
        exchange(f"http://127.0.0.1:{port}", b"NONSENSE\r\n\r\n")
        process.stdin.write("\n")
        process.stdin.flush()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    return [lines.splitlines() for lines in said.split("---\n")]


@pytest.fixture(scope="module")
def entries(logged) -> list[dict]:
    return [json.loads(line) for line in logged[0]]


def test_every_line_is_an_object(entries):
    for entry in entries:
        assert {"time", "level", "logger", "message"} <= entry.keys()
        assert entry["time"].endswith("+00:00")
    assert {"uvicorn.error", "ropewalk.http", "ropewalk.server.engine.engine", "py.warnings"} <= {
        entry["logger"] for entry in entries
    }


def test_requests_have_their_facts_beside_the_message(entries):
    models, nowhere, nonsense = (each for each in entries if each["logger"] == "ropewalk.http")
    assert (models["method"], models["path"], models["route"], models["status"]) == (
        *("GET", "/v1/models/", "/v1/models", 200),
    )
    assert models["request_id"] == "abc" and models["seconds"] < 5 and models["bytes"] > 100
    assert nowhere["path"] == "/v1/no%0Awhere" and nowhere["route"] is None
    assert (nowhere["status"], nowhere["code"]) == (404, "not_found")
    assert nonsense["code"] == "bad_request" and "HTTP client" in nonsense["reason"]


def test_a_failure_has_its_trace(entries):
    (failed,) = (each for each in entries if each["logger"] == "ropewalk.server.engine.engine")
    assert failed["message"] == "a step failed\nbadly" and failed["level"] == "ERROR"
    assert failed["exception"].startswith("Traceback")
    assert failed["exception"].endswith("ZeroDivisionError: division by zero")


def test_bytes_that_are_no_http_have_one_line(logged):
    said = logged[1]
    assert sum("Invalid HTTP request" in line for line in said) == 0
    assert sum("bad_request" in line for line in said) == 1
    assert any(" INFO ropewalk.http: GET /v1/models/ 200, " in line for line in said)


@pytest.mark.parametrize("message", ["a\nb", "\u2028", "\x1b[31m", "\ud800", '"}{'])
def test_a_message_stays_in_its_line(message):
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", (message,), None)
    line = JsonLines().format(record)
    assert line.isprintable() and json.loads(line)["message"] == message


def test_what_json_has_no_form_for_is_written_as_text():
    record = logging.LogRecord("a", logging.INFO, "", 0, "x", (), None)
    record.fields = {"path": Path("a/b"), "n": 1}
    entry = json.loads(JsonLines().format(record))
    assert (entry["path"], entry["n"]) == ("a/b", 1)


def test_what_takes_long_is_told_in_the_logs_form(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "PATIENCE_S", 0)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    told = logging.getLogger()
    monkeypatch.setattr(told, "handlers", [handler])
    monkeypatch.setattr(told, "level", logging.INFO)
    with terminal.bar("fetching", 2048, "B") as bar:
        bar.update(2048)
    with terminal.said_if_long("compiling"):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["fetching: 2,048 B", "compiling"]
