"""The socket is bound early, and a refusal says what to do."""

import socket

import pytest

from server import listen
from server.errors import CommandError


def test_bound_but_not_listening_yet() -> None:
    with listen.bind("127.0.0.1", 0) as bound:
        address = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=1)
        bound.listen()
        socket.create_connection(address, timeout=1).close()


def test_taken_port() -> None:
    with listen.bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(
            CommandError, match=f":{port}: another program is using this port; stop it"
        ):
            listen.bind("127.0.0.1", port)
    listen.bind("127.0.0.1", port).close()


def test_port_is_free_again_at_once_after_a_connection() -> None:
    with listen.bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = first.accept()
            accepted.close()  # the server's side closes first and keeps TIME_WAIT
            assert client.recv(1) == b""
    listen.bind("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "this machine has no such address"), ("no such host", "does not resolve")],
)
def test_odd_hosts(host: str, reason: str) -> None:
    with pytest.raises(CommandError, match=reason):
        listen.bind(host, 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_address_for_programs_on_this_machine(host: str, url: str) -> None:
    assert listen.local_url(host, 80) == url
