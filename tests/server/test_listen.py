"""The socket is bound early, and a refusal says what to do."""

import errno
import fcntl
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from ropewalk.server import listen
from ropewalk.server.errors import CommandError


def test_bound_but_not_listening_yet() -> None:
    with listen.bind("127.0.0.1", 0) as bound:
        address = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=1)
        bound.listen()
        socket.create_connection(address, timeout=1).close()


def test_a_taken_port_is_free_again_at_once() -> None:
    with listen.bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        said = f":{port}: another program is using this port; stop it"
        with pytest.raises(CommandError, match=said):
            listen.bind("127.0.0.1", port)
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
    assert listen.local_url(host, 80, tls=True) == url.replace("http", "https")


def test_a_unix_socket_is_there_as_long_as_it_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen.bound("ignored", 0, path) as bound:
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


# Nothing answers yet where a server still loads, as where one is gone; but it has the lock.
@pytest.mark.parametrize(
    ("begin", "listening"), [(listen.bind_unix, True), (partial(listen.bound, "", 0), False)]
)
def test_a_socket_in_use_is_refused_and_kept(begin, listening, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with begin(path) as first:
        if listening:
            first.listen()
        with (
            pytest.raises(CommandError, match=r"/s: another program is using this socket"),
            listen.bound("", 0, path),
        ):
            pass
        assert path.is_socket()
    with listen.bound("", 0, path):
        assert path.is_socket()


def test_two_servers_that_follow_one_do_not_both_begin(tmp_path: Path, monkeypatch) -> None:
    """One has opened the lock's file when the server before removes it, and another makes it."""
    path, lock = tmp_path / "s", tmp_path / "s.lock"

    def flock(*_) -> None:
        lock.rename(tmp_path / "removed")
        lock.touch()

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(CommandError, match=r"/s: another program is using this socket"),
        listen.bound("", 0, path),
    ):
        pass
    assert lock.exists()


def test_the_socket_of_a_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen.bind_unix(path).close()
    assert path.is_socket()
    with listen.bound("", 0, path) as second:
        second.listen()


def test_a_server_leaves_the_socket_that_replaced_its_own(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen.bound("", 0, path):
        os.rename(path, tmp_path / "kept")  # else the next one may get its inode
        listen.bind_unix(path).close()
    assert path.is_socket()
    with listen.bound("", 0, path):
        path.unlink()
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "it is not a socket; choose another --uds"),
        ("", "it is not a socket"),
        ("no/where", os.strerror(errno.ENOENT)),
        ("x" * 120, "the path is too long for a socket; choose another --uds"),
    ],
)
def test_odd_paths(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CommandError, match=reason):
        listen.bind_unix(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
