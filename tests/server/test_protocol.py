"""Raw bytes against a running server: what is refused on the socket, and how fast."""

import contextlib
import json
import socket
import sys
import time

import pytest

from ropewalk.server.http.chunked import MAX_UNREAD
from ropewalk.server.http.protocol import MAX_HEAD, MAX_HEADERS, Protocol
from tests.server.sockets import (
    answered,
    completion,
    connect,
    exchange,
    post,
    read_all,
    read_until,
    refusal,
    response,
)
from tests.server.toy import ScriptedEngine, running, toy, toy_app, wait_for

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: toy\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: toy\r\n"


class Hasty(Protocol):
    """The same limits, sooner."""

    head_seconds = 0.3
    request_seconds = 0.6
    linger_seconds = 0.2


@pytest.fixture(scope="module")
def url():
    with running(toy_app(max_body_bytes=1000)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def hasty():
    with running(toy_app(), http=Hasty) as (address, _):
        yield address


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"content-length: 0x2\r\n\r\n{}",
        HEAD + b"content-length: 2_0\r\n\r\n{}",
        GET + b"x: a\n\r\n\r\n",
        GET + b"x: a\ny: b\r\n\r\n",
        b"GET /health HTTP/1.1\nhost: toy\n\n",
        GET + b"x: a\r\n b\r\n\r\n",
        GET + b"x: a\r\n\tb\r\n\r\n",
        GET + b"x: a\0b\r\n\r\n",
        GET + b"x: a\rb\r\n\r\n",
        GET + b"x : a\r\n\r\n",
        GET + b": a\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /hea lth HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET /health HTTP/9.9\r\nhost: toy\r\n\r\n",
        b"GET health HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET ftp://toy/health HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET http:///health HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET http://me@toy/health HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET http://toy:x/health HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET http://toy/health HTTP/1.1\r\n\r\n",
    ],
)
def test_what_could_be_read_differently_is_400(url, data):
    error = refusal(exchange(url, data), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "data",
    [
        GET + b"x: " + b"a" * MAX_HEAD + b"\r\n\r\n",
        GET + b"x: " + b"a" * 1_000_000,
        GET + b"".join(b"x%d: a\r\n" % index for index in range(MAX_HEADERS)) + b"\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: toy\r\n\r\n",
        b"GET /" + b"a" * 1_000_000,
    ],
    ids=["one long header", "endless header", "many headers", "long target", "endless target"],
)
def test_too_much_header_is_431(url, data):
    with connect(url) as client:
        # It may stop reading before all is sent, as it should.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(data)
        assert refusal(read_all(client), 431)["code"] == "headers_too_large"


def test_a_refused_client_may_send_what_it_has_begun(url):
    """Or its own system would throw the refusal away before it is read."""
    with connect(url) as client:
        for _ in range(4):
            client.sendall(GET + b"x: " + b"a" * 1_000_000)
            time.sleep(0.05)
        assert refusal(read_all(client), 431)["code"] == "headers_too_large"


def test_a_refused_client_that_goes_on_is_cut(hasty):
    with connect(hasty) as client:
        client.sendall(GET + b"x: " + b"a" * 100_000)
        assert refusal(read_all(client), 431)["code"] == "headers_too_large"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(100):
                client.sendall(b"a")
                time.sleep(0.05)


def test_headers_just_inside_the_limits(url):
    many = b"".join(b"x%d: a\r\n" % index for index in range(MAX_HEADERS - 2))
    assert response(exchange(url, GET + many + b"connection: close\r\n\r\n"))[0] == 200
    long = b"x: " + b"a" * (MAX_HEAD - len(GET) - 30) + b"\r\n"
    assert response(exchange(url, GET + long + b"connection: close\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("more", [b"", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize("length", [1001, 10**12, 10**18])
def test_a_body_over_the_limit_is_413_before_it_is_sent(url, length, more):
    raw = exchange(url, HEAD + more + b"content-length: %d\r\n\r\n" % length)
    assert refusal(raw, 413)["code"] == "body_too_large"


def test_a_body_growing_over_the_limit_is_413(url):
    with connect(url) as client:
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            client.sendall(b"190\r\n" + b" " * 400 + b"\r\n")
        assert refusal(read_all(client), 413)["code"] == "body_too_large"


def test_a_malformed_body_that_came_unasked_is_400_and_no_failure(url, caplog):
    head = CHUNKED.replace(b"host:", b"expect: 100-continue\r\nhost:")
    assert refusal(exchange(url, head + b"x\r\n"), 400)["code"] == "bad_request"
    assert "failed unexpectedly" not in caplog.text


def test_an_accepted_body_is_asked_for(url):
    request = post("/v1/completions", {"prompt": "a", "max_tokens": 1}, expect="100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    with connect(url) as client:
        client.sendall(head + b"\r\n\r\n")
        assert b"100 " in read_until(client, b"\r\n\r\n")
        assert b"200 OK" in answered(client, body)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"model": "toy", "prompt": "abc", "max_tokens": 1}'
SIZE = b"%x" % len(BODY)
WHOLE = SIZE + b"\r\n" + BODY + b"\r\n"
SECOND = b"GET /version HTTP/1.1\r\nhost: toy\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        WHOLE + b"0\r\nX: y\n\n",
        WHOLE + b"0\r\nX: y\n\r\n",
        WHOLE + b"0\r\nX: y\r\n\n",
        WHOLE + b"0\r\n\n",
        WHOLE + b"0\n\r\n",
        WHOLE + b"0\n\n",
        WHOLE + b"0\r\nX : y\r\n\r\n",
        WHOLE + b"0\r\nX: y\r\n z\r\n\r\n",
        WHOLE + b"0\r\nno name\r\n\r\n",
        WHOLE + b"0\r\nX: a\0b\r\n\r\n",
        WHOLE + b"0\r\nX: a\rb\r\n\r\n",
        WHOLE + b"0;a=\0\r\n\r\n",
        WHOLE + b"0;a\x0b\r\n\r\n",
        WHOLE + b"0;a\rb\r\n\r\n",
        WHOLE + b"0;a\nb\r\n\r\n",
        WHOLE + b'0;a="\r\n"\r\n\r\n',
        WHOLE + b'0;a="b\r\n\r\n',
        WHOLE + b"0;\r\n\r\n",
        WHOLE + b"0 ;a\r\n\r\n",
        WHOLE + b"0 \r\n\r\n",
        WHOLE + b" 0\r\n\r\n",
        WHOLE + b"0x0\r\n\r\n",
        WHOLE + b"-0\r\n\r\n",
        WHOLE + b"+0\r\n\r\n",
        WHOLE + b"0_0\r\n\r\n",
        WHOLE + b"\r\n0\r\n\r\n",
        WHOLE + b"00000000000000000\r\n\r\n",
        SIZE + b"\n" + BODY + b"\r\n0\r\n\r\n",
        SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n",
        SIZE + b"\r\n" + BODY + b"0\r\n\r\n",
        SIZE + b"\r\n" + BODY + b" \r\n0\r\n\r\n",
        SIZE + b"\r\n" + BODY[:-1] + b"\r\n0\r\n\r\n",
    ],
)
def test_a_chunked_body_that_could_be_read_differently_is_400(url, body):
    """And what follows it is no request, wherever another parser may see its end."""
    raw = exchange(url, CHUNKED + body + SECOND)
    assert refusal(raw, 400)["code"] == "bad_request"


@pytest.mark.parametrize(
    "body",
    [
        WHOLE + b"0;" + b"a" * MAX_UNREAD + b"\r\n\r\n",
        (b"1;" + b"a" * 500 + b"\r\n \r\n") * 40 + WHOLE + b"0\r\n\r\n",
        WHOLE + b"0\r\n" + b"x: y\r\n" * 4000 + b"\r\n",
    ],
    ids=["one extension", "many extensions", "many trailers"],
)
def test_what_nobody_reads_of_a_chunked_body_is_bounded(url, body):
    assert refusal(exchange(url, CHUNKED + body), 400)["code"] == "bad_request"


@pytest.mark.parametrize(
    "body",
    [
        WHOLE + b"0\r\n\r\n",
        WHOLE + b"0000\r\nX: y\r\nx-sum: \xe4 b \r\n\r\n",
        SIZE.upper() + b';a;b=c;d="e; \\" f"\r\n' + BODY + b"\r\n0;a=b\r\n\r\n",
        b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    ],
    ids=["plain", "trailers", "extensions", "single bytes"],
)
@pytest.mark.parametrize("pause", [False, True])
def test_a_chunked_body_is_read_to_its_end(url, body, pause):
    data = CHUNKED + body
    step = 7 if pause else len(data)
    with connect(url) as client:
        for at in range(0, len(data), step):
            client.sendall(data[at : at + step])
            time.sleep(0.001 * pause)
        assert b"200 OK" in read_until(client, b"}}")
        client.sendall(SECOND)
        assert b"version" in read_until(client, b"}")


def test_http_1_0_has_no_chunked_bodies(url):
    data = CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + WHOLE + b"0\r\n\r\n"
    assert "HTTP/1.0" in refusal(exchange(url, data), 400)["message"]


def test_pipelined_requests_are_answered_in_order(url):
    ready = GET.replace(b"/health", b"/health/ready") + b"\r\n"
    live = GET.replace(b"/health", b"/health/live") + b"connection: close\r\n\r\n"
    raw = exchange(url, ready + completion(max_tokens=1) + live)
    assert raw.index(b'"ready"') < raw.index(b"text_completion") < raw.index(b'"live"')


def test_a_connection_outlives_an_error_of_the_application(url):
    with connect(url) as client:
        assert b"invalid_value" in answered(client, completion(temperature=9))
        assert b"200 OK" in answered(client, completion(max_tokens=1))


@pytest.mark.parametrize(
    "target", [b"//v1/models", b"/%76%31/models", b"/v1/../v1/models", b"http://toy/v1/models"]
)
def test_no_spelling_of_a_path_opens_it(target):
    with running(toy_app(api_keys=frozenset({"k"}))) as (address, _):
        data = b"GET " + target + b" HTTP/1.1\r\nhost: x/?\r\nconnection: close\r\n\r\n"
        assert response(exchange(address, data))[0] in (400, 401)


def test_a_target_with_a_host_may_have_a_body(url):
    request = completion(max_tokens=1).replace(b"/v1/", b"http://toy/v1/")
    with connect(url) as client:
        assert b"200 OK" in answered(client, request)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://evil.example/version", b"toy", 421),
        (b"http://[::1]:8000/version", b"toy", 421),
        (b"http://toy/version", b"evil.example", 200),
        (b"HTTP://TOY:8000/version/", b"x", 200),
        (b"https://toy:/version?a=http://b/", b"x", 200),
        (b"http://toy.evil.example/version", b"toy", 421),
        (b"http://toy", b"evil.example", 404),
        (b"http://toy?/health", b"evil.example", 404),
    ],
)
def test_a_host_in_the_target_counts_and_no_other(target, host, status):
    data = b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n"
    with running(toy_app(allowed_hosts=frozenset({"toy"}))) as (address, _):
        got, _, body = response(exchange(address, data))
    assert (got, list(json.loads(body))) == (status, ["version" if status == 200 else "error"])


def test_the_answer_to_head_has_no_body(url):
    head = GET.replace(b"GET", b"HEAD") + b"\r\n"
    raw = exchange(url, head * 2 + GET + b"connection: close\r\n\r\n")
    assert raw.count(b"200 OK") == 3
    assert raw.count(b"content-length: 18") == 3
    assert raw.count(b"ready") == 1
    missing = head.replace(b"/health", b"/nothing") + GET + b"connection: close\r\n\r\n"
    raw = exchange(url, missing)
    assert b"404 Not Found" in raw and b"not_found" not in raw and b"200 OK" in raw


def silent(client):
    return None


def half_a_header(client):
    client.sendall(GET)


def half_a_body(client):
    client.sendall(HEAD + b"content-length: 100\r\n\r\n{")


def drip(client):
    """One byte at a time must not move the deadline."""
    for byte in GET + b"x: " + b"y" * 500:
        time.sleep(0.02)
        try:
            client.sendall(bytes([byte]))
        except OSError:
            return


@pytest.mark.parametrize(
    ("attack", "least", "before"),
    [
        (silent, 0.25, b""),
        (half_a_header, 0.25, b""),
        (half_a_body, 0.55, b""),
        (drip, 0.25, b""),
        (half_a_body, 0.55, completion(max_tokens=1)),  # a second request has the same deadline
        (drip, 0.25, completion(max_tokens=1)),
    ],
)
def test_requests_that_do_not_arrive_are_408(hasty, attack, least, before):
    with connect(hasty) as client:
        if before:
            client.sendall(before)
            read_until(client, b"}}")
        start = time.monotonic()
        attack(client)
        raw = read_all(client)
    assert least <= time.monotonic() - start < 5
    if attack is drip and not raw:
        return  # its last byte met a closed connection, and the answer was lost with it
    assert refusal(raw, 408)["code"] == "request_timeout"


@pytest.mark.parametrize("pause", [0, 0.1])
def test_a_body_that_nobody_waited_for_leaves_the_connection_as_it_was(hasty, pause):
    with connect(hasty) as client:
        for _ in range(2):
            client.sendall(b"POST /nowhere HTTP/1.1\r\nhost: toy\r\ncontent-length: 2\r\n")
            assert b"404 Not Found" in answered(client, b"content-type: application/json\r\n\r\n{")
            time.sleep(pause)
            client.sendall(b"}")
            time.sleep(0.4)  # two such requests outlast the deadline of one
        assert b"200 OK" in answered(client, completion(max_tokens=1))


def test_such_a_connection_is_not_kept_for_ever():
    class Brief(Protocol):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.timeout_keep_alive = 0.2

    with running(toy_app(), http=Brief) as (address, _), connect(address) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nhost: toy\r\ncontent-length: 2\r\n")
        assert b"404 Not Found" in answered(client, b"content-type: application/json\r\n\r\n{")
        client.sendall(b"}")
        assert read_all(client) == b""


def test_an_answer_may_take_longer_than_the_deadline_of_the_request():
    engine = ScriptedEngine(pause=0.05)
    with running(toy_app(engine), http=Hasty) as (address, _), connect(address) as client:
        client.sendall(completion(max_tokens=20, stream=True))
        assert read_until(client, b"[DONE]").count(b"data: ") == 21


def test_idle_connections_do_not_disturb_others(url):
    idle = [connect(url) for _ in range(200)]
    try:
        for _ in range(5):
            with connect(url) as client:
                assert b"200 OK" in answered(client, completion(max_tokens=1))
    finally:
        for client in idle:
            client.close()


def test_garbage_after_the_request_leaves_its_answer_whole(url):
    with connect(url) as client:
        client.sendall(completion(max_tokens=3, stream=True) + b"\0garbage\r\n\r\n")
        raw = read_all(client)
    assert raw.count(b"[DONE]") == 1
    assert b"400 Bad Request" in raw[raw.index(b"[DONE]") :]


@pytest.mark.parametrize("more", [b"\r\n", GET + b"\r\n", completion(max_tokens=9)])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sent_more_and_leaves_is_noticed(more, stream):
    engine = ScriptedEngine(pause=0.02)
    with running(toy_app(engine)) as (address, _):
        with connect(address) as client:
            client.sendall(completion(max_tokens=400, stream=stream))
            wait_for(lambda: engine.live == 1)
            client.sendall(more)
            time.sleep(0.05)
        wait_for(lambda: engine.live == 0, 2)
    assert len(engine.aborted) == 1 and len(engine.requests) == 1


def half_closed(url, data: bytes) -> bytes:
    """What a client gets that sends `data` and closes its side."""
    with connect(url) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return read_all(client)


@pytest.mark.parametrize("pause", [0, 0.02])
def test_a_half_closed_client_gets_its_answer(pause):
    engine = ScriptedEngine(pause=pause)
    with running(toy_app(engine)) as (address, server):
        raw = half_closed(address, completion(max_tokens=20))
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n") and raw.count(b"HTTP/1.1") == 1
        assert json.loads(response(raw)[2])["usage"]["completion_tokens"] == 20
        assert b"[DONE]" in half_closed(address, completion(max_tokens=20, stream=True))
        assert refusal_code(half_closed(address, completion(temperature=9))) == "invalid_value"
        assert half_closed(address, SECOND).endswith(b'"}')
        expecting = completion(max_tokens=20).replace(b"host: ", b"expect: 100-continue\r\nhost: ")
        assert b"200 OK" in half_closed(address, expecting)
        wait_for(lambda: not server.server_state.connections)
    assert engine.live == 0 and not engine.aborted


@pytest.mark.skipif(sys.platform != "linux", reason="probes need Linux")
def test_a_half_closed_client_that_leaves_later_frees_its_request(monkeypatch):
    """Nothing is sent to it before its whole answer, so only a probe can tell."""
    monkeypatch.setattr(Protocol, "probe_seconds", 1)
    engine = ScriptedEngine(pause=60)
    with running(toy_app(engine)) as (address, _):
        with connect(address) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)  # forgotten after 1 s
            client.sendall(completion(max_tokens=20))
            client.shutdown(socket.SHUT_WR)
            wait_for(lambda: engine.live == 1)
            assert client.recv(99) == b"HTTP/1.1 "
        wait_for(lambda: engine.live == 0, 10)
    assert len(engine.aborted) == 1


def refusal_code(raw: bytes) -> str:
    return json.loads(response(raw)[2])["error"]["code"]


def test_a_half_closed_client_gets_all_its_answers_in_order():
    engine = ScriptedEngine(pause=0.02)
    both = completion(max_tokens=9) + SECOND + completion(max_tokens=3, stream=True)
    with running(toy_app(engine)) as (address, _):
        raw = half_closed(address, both)
        assert raw.count(b"200 OK") == 3
        assert raw.index(b"text_completion") < raw.index(b'"version"') < raw.index(b"[DONE]")
        raw = half_closed(address, both + completion()[:-1])
        assert raw.count(b"200 OK") == 3 and raw.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        raw = half_closed(address, completion(max_tokens=9) + b"\0garbage\r\n\r\n")
        assert b"200 OK" in raw and b"400 Bad Request" in raw
    assert not engine.aborted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["first token", "answer"])
def test_a_half_closed_client_that_leaves_is_noticed(stream, before):
    engine = ScriptedEngine(pause=60 if before == "first token" else 0.02)
    app = toy_app(engine)
    with running(app) as (address, server):
        with connect(address) as client:
            client.sendall(completion(max_tokens=400, stream=stream))
            client.shutdown(socket.SHUT_WR)
            wait_for(lambda: engine.live == 1)
            time.sleep(0.2)
            assert engine.live == 1
        wait_for(lambda: engine.live == 0, 1)
        wait_for(lambda: not server.server_state.connections, 1)
    assert len(engine.aborted) == 1


def test_a_unix_socket_may_be_half_closed(tmp_path):
    engine = ScriptedEngine(pause=0.02)
    path = tmp_path / "s"
    with running(toy_app(engine), path=path), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(completion(max_tokens=9))
        client.shutdown(socket.SHUT_WR)
        assert b"200 OK" in read_all(client)
        with socket.socket(socket.AF_UNIX) as leaver:
            leaver.connect(str(path))
            leaver.sendall(completion(max_tokens=400))
            wait_for(lambda: engine.live == 1)
        wait_for(lambda: engine.live == 0, 1)
    assert len(engine.aborted) == 1


class Impatient(Protocol):
    unread_seconds = 0.3


LONG = toy_app(served=[toy("x" * 20_000_000)])  # an answer longer than any socket's buffers
MODELS = GET.replace(b"/health", b"/v1/models")


@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
def test_a_client_that_reads_nothing_of_an_answer_is_cut(header):
    with (
        running(LONG, http=Impatient) as (address, server),
        connect(address, receive_buffer=4096) as client,
    ):
        client.sendall(MODELS + header + b"\r\n")
        wait_for(lambda: len(server.server_state.connections) == 1)
        wait_for(lambda: not server.server_state.connections, 5)
        assert len(read_all(client)) < 20_000_000


def test_a_client_that_reads_an_answer_slowly_gets_all_of_it():
    with running(LONG, http=Impatient) as (address, _), connect(address) as client:
        client.sendall(MODELS + b"connection: close\r\n\r\n")
        read = 0
        start = time.monotonic()
        while more := client.recv(1 << 20):
            read += len(more)
            if time.monotonic() - start < 1.5:
                time.sleep(0.1)
    assert read > 20_000_000


@pytest.mark.parametrize(
    "rest",
    [
        b"host: a\r\nhost: b\r\n\r\n",  # h11 refuses it
        b"host: toy\nx: y\r\n\r\n",
        b"x: " + b"y" * MAX_HEAD + b"\r\n\r\n",
        b"host: toy\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_a_head_request_that_is_refused_has_no_body_either(url, rest, caplog):
    status, headers, body = response(exchange(url, b"HEAD /version HTTP/1.1\r\n" + rest))
    assert status in (400, 431)
    assert (headers["connection"], body) == ("close", b"")
    assert "protocol.data_received() call failed" not in caplog.text
