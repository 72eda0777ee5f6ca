"""Talking to a running server byte by byte."""

import json
import socket
from urllib.parse import urlsplit

from tests.server.toy import wait_for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connect(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(10)
    try:
        client.connect((parts.hostname, parts.port))
    except OSError:
        client.close()
        raise
    return client


def post(path: str, body: dict, **headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: toy",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def completion(**body) -> bytes:
    return post("/v1/completions", {"model": "toy", "prompt": "abc"} | body)


def read_until(client: socket.socket, end: bytes) -> bytes:
    """Bytes up to and including `end`; fails when the connection closes before."""
    data = b""
    while end not in data:
        more = client.recv(65536)
        assert more, data
        data += more
    return data


def answered(client: socket.socket, request: bytes) -> bytes:
    """A whole answer in JSON of objects within objects."""
    client.sendall(request)
    return read_until(client, b"}}")


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    while True:
        try:
            more = client.recv(65536)
        except ConnectionResetError:
            return data
        if not more:
            return data
        data += more


def exchange(url: str, data: bytes) -> bytes:
    """One request on its own connection, to be closed by the server."""
    with connect(url) as client:
        client.sendall(data)
        return read_all(client)


def response(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body (still chunked, if it was)."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def refusal(raw: bytes, status: int) -> dict:
    """The error of an answer that must be exactly one JSON refusal with that status."""
    got, headers, body = response(raw)
    assert got == status, raw[:300]
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def wait_until_idle(engine) -> None:
    wait_for(lambda: engine.live == 0)
