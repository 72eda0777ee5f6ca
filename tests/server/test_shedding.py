"""Refusals from bytes: as the application would refuse, or not at all."""

import json

import pytest

from ropewalk.server.errors import Unauthorized
from ropewalk.server.http.access_log import HttpLog
from ropewalk.server.http.door import Door, Shedder
from ropewalk.server.http.streaming import Drain
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.scheduling.request import Outlook
from tests.server.sockets import connect, post, read_until
from tests.server.toy import ScriptedEngine, rejected, running, toy_app

FULL = Outlook(seats=0, waiting=3, places=3)
KEY = {"authorization": "Bearer k"}


def request(**headers: str) -> bytes:
    return post("/v1/completions", {"model": "toy", "prompt": "abc", "max_tokens": 1}, **headers)


PLAIN = request(**KEY)


def ask(url: str, data: bytes, end: bytes = b"}}") -> tuple[str, dict[str, str], dict]:
    with connect(url) as client:
        client.sendall(data)
        head, _, body = read_until(client, end).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), json.loads(body)


@pytest.mark.parametrize("options", [{}, {"api_keys": ("k",), "allowed_hosts": {"toy"}}])
def test_it_answers_as_the_application_does(options, monkeypatch):
    read = []  # what was left to be read
    answer = Shedder.answer
    monkeypatch.setattr(
        Shedder, "answer", lambda *args: answer(*args) or read.append(args[1]) or None
    )
    engine = ScriptedEngine(ahead=FULL)
    app = toy_app(engine, **options)
    with running(app) as (url, _):
        usual, quick = ask(url, PLAIN), ask(url, request(**KEY, x_request_id="mine"))
        assert not read
        assert usual[0] == quick[0] == "HTTP/1.1 429 Too Many Requests"
        assert quick[1].keys() == usual[1].keys() | {"connection"}
        assert quick[1]["x-request-id"] == "mine" != usual[1]["x-request-id"]
        for each in (usual, quick):
            assert each[2]["error"]["code"] == "queue_full"
            assert int(each[1]["retry-after"]) > 0
        assert rejected(app, "queue_full", "queue_full") == 2
        engine.ahead = Outlook()  # there is room again
        for _ in range(2):
            assert ask(url, PLAIN, b'"usage":')[0] == "HTTP/1.1 200 OK"
        assert read == [PLAIN]


def test_a_request_that_comes_in_pieces_is_refused_in_the_end():
    engine = ScriptedEngine(ahead=FULL)
    with running(toy_app(engine)) as (url, _):
        ask(url, PLAIN)
        with connect(url) as client:
            for piece in (PLAIN[:9], PLAIN[9:60], PLAIN[60:]):
                client.sendall(piece)
                with connect(url) as other:
                    other.sendall(PLAIN)
                    read_until(other, b"}}")
            assert b"429" in read_until(client, b"}}")


def shedder(*, draining: bool = False) -> Shedder:
    def identify(scope):
        if dict(scope["headers"]).get(b"authorization") != b"Bearer k":
            raise Unauthorized("no")
        return "k"

    door, drain = Door(["toy"], lambda model: FULL), Drain()
    assert not Shedder(door, drain, identify, None).active
    door.refusal("k")
    if draining:
        drain.begin(1.0)
    return Shedder(door, drain, identify, HttpLog(Metrics(), access_log=False))


def test_one_place_is_for_one_of_those_who_come_together():
    def place(model):
        return Outlook(seats=1, waiting=3 * full, places=1)

    full = True
    door = Door(["toy"], place)
    door.refusal("k")
    asked = Shedder(door, Drain(), lambda scope: "k", HttpLog(Metrics(), access_log=False))
    full = False
    answers = [asked.answer(PLAIN, "-") for _ in range(4)]
    assert [each is None for each in answers] == [True, True, False, False]  # a seat and a place
    assert asked.active
    asked.hand_over()
    assert asked.answer(PLAIN, "-") is None


def changed(old: bytes, new: bytes) -> bytes:
    data = PLAIN.replace(old, new, 1)
    assert data != PLAIN
    return data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /v1/completions HTTP/1.1\r\nhost: toy\r\ncontent-length: 0\r\n\r\n",
        changed(b"/v1/completions", b"/v1/embeddings"),
        changed(b"/v1/completions", b"http://toy/v1/completions"),
        changed(b"HTTP/1.1", b"HTTP/1.0"),
        changed(b"host", b"most"),
        changed(b"host", b"Host: toy\r\nhost"),
        changed(b"host", b"origin: http://toy\r\nhost"),
        changed(b"host", b"expect: 100-continue\r\nhost"),
        changed(b"host", b"transfer-encoding: chunked\r\nhost"),
        changed(b"host", b"Content-Length: 1\r\nhost"),
        changed(b"content-length: ", b"content-length: +"),
        changed(b"content-length: ", b"content-length: 1"),
        changed(b"host: toy\r\n", b"host: toy\n"),
        changed(b"host: toy\r\n", b"host: toy\r\n folded\r\n"),
        changed(b"host: toy", b"host: toy\0"),
        changed(b"host:", b"host :"),
        changed(b"host", b"x: \xe9\r\nhost"),
        changed(b"host", b"x: " + b"x" * 5000 + b"\r\nhost"),
        changed(b"Bearer k", b"Bearer w"),
        PLAIN[:-1],
        PLAIN + b"P",
        PLAIN + PLAIN,
    ],
)
def test_whatever_is_not_plain_is_read_as_usual(data):
    asked = shedder()
    assert asked.active
    assert asked.answer(data, "-") is None
    assert asked.answer(PLAIN, "-") is not None


def test_who_drains_has_another_reason():
    assert not shedder(draining=True).active
