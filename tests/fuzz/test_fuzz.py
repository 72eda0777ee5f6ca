"""A short campaign of every kind finds nothing, and what there is to find would be found."""

import json
import socket
from contextlib import contextmanager
from random import Random

import pytest

from ropewalk.server.http import chunked, protocol
from tests.fuzz import campaign, proxy, target
from tests.fuzz.__main__ import main
from tests.fuzz.answers import fault
from tests.fuzz.bodies import ROUTES
from tests.fuzz.campaign import Progress
from tests.fuzz.kinds import bodies_kind, raw_kind
from tests.fuzz.streams import Ending, Exchange, Stream
from tests.server.toy import toy_app

needs_nginx = pytest.mark.skipif(proxy.missing() is not None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    with target.started(folder / "log") as started:
        yield started


def test_bodies_find_nothing(running, tmp_path):
    went = campaign.run(bodies_kind(running), Progress("bodies", 1), 1000, tmp_path)
    assert not went.found and went.done == 1000
    # Most answers would be refusals if the bodies were too wrong to reach any code.
    assert went.answers["200"] > 200 and went.answers["400"] > 200


def test_streams_of_bytes_find_nothing(running, tmp_path):
    went = campaign.run(raw_kind(running), Progress("raw", 1), 500, tmp_path)
    assert not went.found and went.done == 500
    assert went.answers["200"] > 50 and went.answers["400"] > 50


@needs_nginx
@pytest.mark.parametrize("buffering", [True, False])
def test_nginx_and_the_server_count_alike(buffering, tmp_path):
    with proxy.pair(tmp_path, buffering=buffering) as pair:
        went = campaign.run(pair, Progress(pair.name, 1), 100, tmp_path)
    assert not went.found and went.answers["200"] > 50


class Short(chunked.ChunkedReader):
    """Takes any chunk for the last one, and trailers for another request."""

    def _read_size(self, line):
        super()._read_size(line)
        self._left, self._ended = 0, True


@needs_nginx
def test_a_server_that_counts_differently_from_nginx_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(protocol, "ChunkedReader", Short)
    with proxy.pair(tmp_path, buffering=True) as pair:
        went = campaign.run(pair, Progress(pair.name, 1), 50, tmp_path)
    assert went.found["read differently"] > 1


def test_what_nginx_never_sent_or_what_never_came_is_found(tmp_path):
    recorder = proxy.Recorder()
    log = tmp_path / "access.log"
    log.write_text("a 127.0.0.1:1 200 GET /\nb 127.0.0.1:1 200 GET /\nc - 400 GET /\n")
    pair = proxy.Pair("proxy", recorder, 1, 2, tmp_path)
    what = ("GET", "/?", "")
    recorder.asked += [
        proxy.Asked(client="127.1.0.2", nginx="a", what=what, whole=True),
        proxy.Asked(client="127.1.0.2", nginx="a", what=what, whole=True),
        proxy.Asked(client="127.1.0.4", nginx="c", what=what, whole=True),
        proxy.Asked(client="127.0.0.1", nginx=None, what=what, whole=True),
    ]
    found = sorted(pair.settle())
    assert [each.partition(":")[0] for each in found] == ["lost", *["smuggled"] * 3]
    assert pair.settle() == []


JSON = b"HTTP/1.1 %d Some Words\r\ncontent-type: application/json\r\nx-request-id: a\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: a\r\n"
REFUSAL = json.dumps(
    {"error": {"message": "a is wrong; send b", "type": "t", "param": None, "code": "c"}}
).encode()


def answer(status: int, body: bytes) -> bytes:
    return JSON % status + b"content-length: %d\r\n\r\n" % len(body) + body


def events(*lines: bytes) -> bytes:
    body = b"".join(b"%s\n\n" % line for line in lines)
    return EVENTS + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    "raw",
    [
        answer(200, b"{}"),
        answer(400, REFUSAL),
        answer(200, b"{}") + answer(400, REFUSAL),
        JSON % 200 + b"content-length: 7\r\n\r\n" + answer(200, b"{}"),  # of HEAD
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(200, b"{}"),
        events(b"data: {}", b"data: [DONE]"),
        events(b"data: {}", b": ping", b"data: " + REFUSAL),
    ],
)
def test_right_answers_are_no_findings(raw):
    assert fault(SENT, got(raw)) is None


RESPONSES, MESSAGES = (
    Stream(((0.0, b"POST %s HTTP/1.1\r\n" % path),), Ending.WAIT)
    for path in (b"/v1/responses", b"/v1/messages")
)
ENDED = b'event: message_stop\ndata: {"type": "message_stop"}'
PING = b'event: ping\ndata: {"type": "ping"}'
FAILED = b'{"type": "error", "error": {"type": "t", "message": "a is wrong; send b"}}'


@pytest.mark.parametrize(
    ("sent", "raw", "what"),
    [
        (MESSAGES, answer(400, FAILED), None),
        (MESSAGES, events(PING, ENDED), None),
        (MESSAGES, events(PING, b"event: error\ndata: " + FAILED), None),
        (MESSAGES, answer(400, REFUSAL), "without its cause"),
        (MESSAGES, events(PING), "without an end"),
        (MESSAGES, events(PING, ENDED.replace(b"event: m", b"event: n")), "without its name"),
        (MESSAGES, events(b"data: [DONE]"), "without its name"),
        (RESPONSES, answer(400, REFUSAL), None),
        (RESPONSES, answer(400, FAILED), "without its cause"),
        (RESPONSES, events(ENDED.replace(b"message_stop", b"response.completed")), None),
        (RESPONSES, events(ENDED), "without an end"),
    ],
)
def test_translated_answers_have_their_own_form(sent, raw, what):
    found = fault(sent, got(raw))
    assert found is None if what is None else what in (found or "")


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "closed without an answer"),
        (b"nonsense", "malformed"),
        (answer(500, REFUSAL), "500"),
        (answer(200, b"{}") + answer(503, REFUSAL), "503"),
        (answer(200, b"{}").replace(b"x-request-id: a\r\n", b""), "without an id"),
        (answer(200, b"{}")[:-1], "missing"),
        (answer(400, b"Bad Request"), "not JSON"),
        (answer(400, b'{"detail": []}'), "without its cause"),
        (answer(400, REFUSAL.replace(b'"c"', b"null")), "without its cause"),
        (answer(400, REFUSAL.replace(b"a is wrong; send b", b"wrong")), "without its cause"),
        (events(b"data: {}"), "without an end"),
        (events(b"data: [DONE]", b"data: {}"), "without an end"),
        (events(b"data: {}", b"data: [DONE]")[:-5], "ends early"),
    ],
)
def test_wrong_answers_are_findings(raw, what):
    assert what in (fault(SENT, got(raw)) or "")


SENT = Stream(((0.0, b"x"),), Ending.WAIT)


def got(raw: bytes, *, hung: bool = False) -> Exchange:
    return Exchange(raw, whole=True, hung=hung, seconds=0.0)


def test_a_hang_is_a_finding():
    assert fault(SENT, got(b"", hung=True)) == "hang"


def test_leaks_and_failures_are_findings(running):
    kind = raw_kind(running)
    assert kind.settle() == []
    with running.log.open("a") as log:
        log.write("2026-01-01 ERROR ropewalk.server.engine.engine: a step failed\n")
    assert [each[:6] for each in kind.settle()] == ["logged"]
    assert kind.settle() == []
    assert running.leaks(running.open_files()) == []
    assert "descriptors" in running.leaks(3, seconds=0)[0]
    with holding_blocks(running):
        assert any("blocks" in leak for leak in running.leaks(1000, seconds=0))


@contextmanager
def holding_blocks(running):
    """A stream that is not read yet."""
    body = (
        b'{"model": "ropewalk-rope", "prompt": "a", "max_tokens": 400, "ignore_eos": true, '
        b'"stream": true}'
    )
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(running.address) as client:
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        client.recv(100)
        yield


def test_a_case_follows_from_its_number(running):
    for kind in (bodies_kind(running), raw_kind(running)):
        cases = [campaign.case_of(kind, 7, number) for number in range(20)]
        assert cases == [campaign.case_of(kind, 7, number) for number in range(20)]
        assert len({case.data for case in cases}) > 15
        assert all(Stream.of(json.loads(json.dumps(case.plain()))) == case for case in cases)


def test_every_post_route_is_asked(running):
    kind = bodies_kind(running)
    asked = {kind.draw(Random(number)).data.split(b" ")[1].decode() for number in range(600)}
    assert asked == set(ROUTES)
    described = toy_app().openapi()["paths"]
    assert asked >= {path for path, methods in described.items() if "post" in methods}


class Fake:
    """Finds something in every third case."""

    name = "fake"

    def __init__(self) -> None:
        self.tried = 0

    def draw(self, draw):
        return Stream(((0.0, b"%d" % draw.randrange(10**9)),))

    async def attempt(self, stream):
        self.tried += 1
        return ("hang" if int(stream.data) % 3 == 0 else None), b"HTTP/1.1 200 OK\r\n", 0.5

    def settle(self):
        return ["leak: one block"]


def test_a_campaign_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "BATCH", 10)
    one = campaign.run(Fake(), Progress("fake", 3), 60, tmp_path)
    parts = Fake()
    went = campaign.run(parts, Progress("fake", 3), 30, tmp_path / "parts")
    assert campaign.read_progress(tmp_path / "parts", "fake", 3) == went
    went = campaign.run(parts, went, 60, tmp_path / "parts")
    assert went == one and parts.tried == 60
    assert went.found["leak"] == 6 and went.answers == {"200": 60}
    assert len(list((tmp_path / "parts").glob("*.finding.json"))) >= went.found["hang"]
    said = campaign.summary(went)
    assert "60 cases" in said and "leak: 6" in said and "5xx: 0" in said


def test_the_command_line_names_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "there is no kind nonsense" in capsys.readouterr().err


def test_a_finding_can_be_tried_again(tmp_path, monkeypatch, capsys):
    @contextmanager
    def kind_of(name, folder):
        yield Fake()

    monkeypatch.setattr("tests.fuzz.__main__.kind_of", kind_of)
    stream = Stream(((0.0, b"9"),))
    finding = campaign.Finding("fake", 0, 5, 5, "hang", stream, "")
    path = campaign.keep(finding, tmp_path)
    assert main(["--replay", str(path)]) == 1
    assert capsys.readouterr().out.endswith("hang\n")
