"""Chat and health reach a server over TCP, TLS and Unix sockets, and say why they cannot."""

import contextlib
import io
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ropewalk.server import listen
from ropewalk.server.cli import main
from ropewalk.server.cli.connect import address, connected
from ropewalk.server.cli.conversation import ChatOptions, Client
from ropewalk.server.errors import CommandError, UsageError
from tests.server.certificates import issued, self_signed
from tests.server.sockets import free_port
from tests.server.test_drain import texts
from tests.server.test_protocol import Hasty
from tests.server.toy import ScriptedEngine, running, toy_app, wait_for

pytestmark = pytest.mark.usefixtures("no_options")

ROOT = Path(__file__).parents[2]
HERE = "DNS:localhost,IP:127.0.0.1"


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://x", "http://", "", "http://x:8O00", "http://x:99999"),
        *("http://[::1", "unix:", "unix://", "https:///v1"),
    ],
)
def test_odd_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not an http or https URL.*unix:/run/"):
        address(url)


@pytest.mark.parametrize(
    ("url", "path"),
    [("unix:/run/a.sock", "/run/a.sock"), ("unix:///run/a", "/run/a"), ("unix:a/b", "a/b")],
)
def test_address_of_a_unix_socket(url: str, path: str) -> None:
    assert address(url).path == path


def ask(url: str, certificate: Path | None = None) -> str:
    """The model and a streamed answer, as `ropewalk chat` gets them."""
    options = ChatOptions(address(url, certificate), None, None, None, {}, 10.0, False)
    client = Client(options)
    body = {"model": "toy", "messages": [{"role": "user", "content": "a"}], "stream": True}
    chunks = list(client.stream({**body, "max_tokens": 3}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return client.first_model()


def test_a_unix_socket(tmp_path: Path, capsys) -> None:
    path = tmp_path / "s"
    before = os.umask(0o027)
    try:
        with running(toy_app(), path=path) as (url, _):
            assert ask(url) == ask(f"unix://{path}") == "toy"
            assert main.main(["health", "--uds", str(path)]) == 0
            assert main.main(["health", "--ready", "--url", url]) == 0
            assert stat.S_IMODE(path.stat().st_mode) == 0o750
    finally:
        os.umask(before)
    assert f"{url}/health/ready answered 200" in capsys.readouterr().out
    assert not path.exists()
    assert main.main(["health", "--uds", str(path)]) == 1
    assert f"no answer from {url} ([Errno 2]" in capsys.readouterr().err


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("certificate"), HERE)


@pytest.fixture(scope="module")
def secure(certificate):
    with running(toy_app(), http=Hasty, tls=listen.tls_context(*certificate)) as (url, _):
        yield url


def test_https_with_a_certificate_that_is_named(secure, certificate, capsys) -> None:
    port = secure.rsplit(":", 1)[1]
    assert secure.startswith("https://127.0.0.1:")
    assert ask(secure, certificate[0]) == "toy"
    flags = ["--port", port, "--ssl-certfile", str(certificate[0])]
    assert main.main(["health", *flags]) == 0
    assert f"{secure}/health/live answered 200" in capsys.readouterr().out


def test_https_with_a_certificate_that_the_system_trusts(secure, certificate) -> None:
    """Elsewhere, since the tests' own process reads the system's certificates only once."""
    command = [sys.executable, "-m", "ropewalk", "health", "--url", f"{secure}/v1"]
    environ = {**os.environ, "SSL_CERT_FILE": str(certificate[0])}
    assert subprocess.run(command, env=environ, cwd=ROOT, timeout=60).returncode == 0
    context = ssl.create_default_context(cafile=certificate[0])
    assert httpx.get(f"{secure}/version", verify=context).status_code == 200


def test_a_certificate_that_nobody_trusts_is_no_answer(secure, capsys) -> None:
    assert main.main(["health", "--url", secure]) == 1
    said = capsys.readouterr().err
    assert f"the certificate of {secure} is not trusted (self-signed certificate)" in said
    assert "with --ssl-certfile" in said


def test_another_servers_certificate_is_not_this_ones(secure, tmp_path) -> None:
    other, _ = self_signed(tmp_path, HERE)
    with pytest.raises(CommandError, match="is not trusted"):
        ask(secure, other)


def test_an_issuers_certificate_vouches_for_the_servers(tmp_path) -> None:
    """Also where the name is another, since a proxy or a container has names of its own."""
    certificate, key, issuer = issued(tmp_path, "DNS:chat.example")
    with running(toy_app(), tls=listen.tls_context(certificate, key)) as (url, _):
        assert ask(url, issuer) == ask(url, certificate) == "toy"


def test_elsewhere_the_name_must_be_the_certificates(certificate) -> None:
    assert address("https://chat.example", certificate[0]).tls.check_hostname
    assert address("https://chat.example").tls.check_hostname
    assert not address("https://127.0.0.1", certificate[0]).tls.check_hostname


def test_http_and_https_are_not_mixed_up(secure) -> None:
    with pytest.raises(CommandError, match="without an answer; if it speaks https, say so"):
        ask(secure.replace("https", "http"))
    with running(toy_app()) as (url, _), pytest.raises(CommandError, match="no answer from https:"):
        ask(url.replace("http", "https"))


def test_what_is_no_certificate_cannot_be_trusted(tmp_path) -> None:
    file = tmp_path / "x.pem"
    file.write_text("-----BEGIN NONSENSE-----")
    with pytest.raises(UsageError, match="cannot be read as a certificate"):
        address("https://localhost", file)


def test_over_tls_refusals_and_deadlines_are_the_same(secure, certificate) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    port = int(secure.rsplit(":", 1)[1])

    def said(data: bytes) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(data)
            got = b""
            with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
                while more := client.recv(65536):
                    got += more
            return got

    assert said(b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert said(b"GET /health HTTP/1.1\r\nhost: toy\r\nx").startswith(b"HTTP/1.1 408 ")
    body = json.dumps({"model": "toy", "prompt": "a", "stream": True, "max_tokens": 50}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: toy\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = said(head + body)
    assert len(texts(answer)) == 50
    assert b"[DONE]" in answer


def test_a_client_that_leaves_ends_its_stream(certificate, tmp_path) -> None:
    engine = ScriptedEngine(pause=0.02)
    body = {"model": "toy", "messages": [{"role": "user", "content": "a"}], "stream": True}

    def leave(url: str, trusted: Path | None) -> None:
        client = Client(ChatOptions(address(url, trusted), None, None, None, {}, 10.0, False))
        stream = client.stream({**body, "max_tokens": 200})
        next(stream)
        assert engine.live == 1
        stream.close()
        wait_for(lambda: engine.live == 0, 2)

    with running(toy_app(engine), tls=listen.tls_context(*certificate)) as (url, _):
        leave(url, certificate[0])
    with running(toy_app(engine), path=tmp_path / "s") as (url, _):
        leave(url, None)


def test_missing_and_wrong_keys_are_said_before_a_model_is_loaded(tmp_path, capsys) -> None:
    def said(*flags: object) -> str:
        arguments = ["serve", "--port", str(free_port()), "--ssl-certfile", *map(str, flags)]
        assert main.main(arguments) in (1, 2)
        return capsys.readouterr().err

    (tmp_path / "other").mkdir()
    certificate, key = self_signed(tmp_path, HERE)
    _, other = self_signed(tmp_path / "other", HERE, encrypt=True)
    assert "there is no file nowhere.pem; check the path" in said("nowhere.pem")
    assert f"TLS is not possible with {certificate} (" in said(certificate)
    assert "(key values mismatch)" in said(certificate, "--ssl-keyfile", self_signed_key(tmp_path))
    assert "is encrypted; decrypt it" in said(certificate, "--ssl-keyfile", other)
    assert "TLS is not possible" in said(key, "--ssl-keyfile", certificate)


def self_signed_key(folder: Path) -> Path:
    (folder / "third").mkdir()
    return self_signed(folder / "third", HERE)[1]


def test_connection_is_closed_when_left() -> None:
    with running(toy_app()) as (url, _), connected(address(url), 5) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
    assert connection.sock is None


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_the_whole_server(kind: str, tmp_path: Path) -> None:
    """`ropewalk serve` as a user starts it; the curl line that it prints is answered."""
    port = free_port()
    flags = ["--port", str(port), "--uds", str(tmp_path / "a socket")]
    if kind == "tls":
        certificate, key = self_signed(tmp_path, HERE)
        flags = [*flags[:2], "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    command = [sys.executable, "-m", "ropewalk"]
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    serve = [*command, "serve", "toy=shape:tiny", "--max-model-len", "128", *flags]
    with subprocess.Popen(serve, **options) as process:
        try:
            lines = iter(process.stdout.readline, "")
            curl = next(line for line in lines if line.startswith("curl "))
            answer = subprocess.run(["bash", "-c", curl], capture_output=True, timeout=60)
            assert b"data: [DONE]" in answer.stdout, answer.stderr
            where = ["--port", str(port), *flags[2:4]]
            health = subprocess.run([*command, "health", *where], timeout=60, **options)
            assert health.returncode == 0
        finally:
            process.terminate()
        assert process.wait(30) == 0
    assert not (tmp_path / "a socket").exists()


def test_chat_and_health_share_where_the_server_listens(monkeypatch, tmp_path, capsys) -> None:
    path = tmp_path / "s"
    file = tmp_path / "settings.toml"
    file.write_text(f'uds = "{path}"\napi-key = "sesame"\nmax-seqs = 3\n')
    with running(toy_app(), path=path):
        monkeypatch.setenv("ROPEWALK_UDS", str(path))
        assert main.main(["health"]) == 0
        monkeypatch.delenv("ROPEWALK_UDS")
        assert main.main(["health", "--config", str(file)]) == 0
        monkeypatch.setenv("ROPEWALK_CONFIG", str(file))
        assert main.main(["health"]) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
        assert main.main(["chat", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.count(f"unix:{path}/health/live answered 200") == 3
