"""Where a server listens, as options say, and how a command reaches it. Knows no route.

Over TCP, TLS or a Unix socket. No torch.
"""

import http.client
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from ropewalk.server.cli.config_file import config_option
from ropewalk.server.cli.options import Setting, Value
from ropewalk.server.cli.serve import SETTINGS, as_told, is_flag, listening
from ropewalk.server.errors import CommandError, UsageError
from ropewalk.server.listen import is_loopback, local_url

_OTHER_NAMES = (62, 64)  # OpenSSL's codes for a certificate of another host, or address


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. `url` is for messages; `tls` and `path` say over what."""

    url: str
    host: str
    port: int | None
    prefix: str = ""  # of every path, without /v1
    tls: ssl.SSLContext | None = None  # None: plain HTTP
    path: str | None = None  # of a Unix socket, instead of host and port


def reaching(prefix: str) -> tuple[Setting, ...]:
    """The options of a client about its server; its variables begin with `prefix`."""
    return (
        config_option(
            "Server", "file of the server's settings, which say where it listens", SETTINGS
        ),
        *listening(
            "Server",
            host="host of the server",
            port="port of the server",
            uds="Unix socket of the server, instead of host and port",
            ssl_certfile="certificate of the server, or of its issuer, to trust, which makes host "
            "and port https; without it the system's are trusted, or those in the variable "
            "SSL_CERT_FILE",
        ),
        Setting(
            "Server",
            "--url",
            "URL of the server, instead of host and port: https://example.org, or unix:PATH",
            Value(str, "url"),
            prefix=prefix,
        ),
    )


def server_of(ctx: click.Context) -> Address:
    """The running server that the options of chat or health name. Raises UsageError."""
    values = as_told(ctx)
    certificate = values["ssl_certfile"]
    if values["url"] and not is_flag(ctx, "ssl_certfile"):
        certificate = None  # the variable's and the file's is of the server on this machine
    local = local_url(values["host"], values["port"], tls=certificate is not None)
    if values["uds"] is not None:
        local = f"unix:{values['uds']}"
    return address(values["url"] or local, certificate)


def address(url: str, certificate: Path | None = None) -> Address:
    """From http://, https:// or unix:PATH. `certificate` is the one to trust. Raises UsageError."""
    scheme, _, rest = url.partition(":")
    if scheme == "unix" and rest.strip("/"):
        path = rest.removeprefix("//") if rest.startswith("///") else rest
        return Address(url, "localhost", None, path=path)
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError(
            f"--url: {url!r} is not an http or https URL; write for example "
            "http://127.0.0.1:8000, or unix:/run/ropewalk.sock for a Unix socket"
        ) from None
    tls = _trusting(certificate, host) if parts.scheme == "https" else None
    return Address(url, host, port, parts.path.rstrip("/").removesuffix("/v1"), tls)


@contextmanager
def connected(where: Address, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
    """A connection that opens with its first request. Raises CommandError when there is none."""
    if where.path is not None:
        connection: http.client.HTTPConnection = _UnixConnection(where.path, timeout_s)
    elif where.tls is not None:
        connection = http.client.HTTPSConnection(
            where.host, where.port, timeout=timeout_s, context=where.tls
        )
    else:
        connection = http.client.HTTPConnection(where.host, where.port, timeout=timeout_s)
    try:
        yield connection
    except ssl.SSLCertVerificationError as error:
        advice = "name it, or its issuer's, with --ssl-certfile"
        if error.verify_code in _OTHER_NAMES:
            advice = "give a name that the certificate bears, with --url https://NAME"
        raise CommandError(
            f"the certificate of {where.url} is not trusted ({error.verify_message}); {advice}"
        ) from error
    except http.client.RemoteDisconnected as error:
        hint = "" if where.tls or where.path else "; if it speaks https, say so with --url https://"
        raise CommandError(f"{where.url} closed the connection without an answer{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(
            f"no answer from {where.url} ({error or type(error).__name__}); start the server with "
            "ropewalk serve, or name another with --url"
        ) from error
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, whose Host header is localhost."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _trusting(certificate: Path | None, host: str) -> ssl.SSLContext:
    """Trusts the system's issuers (SSL_CERT_FILE names others), or only `certificate`."""
    if certificate is None:
        return ssl.create_default_context()
    try:
        context = ssl.create_default_context(cafile=certificate)
    except OSError as error:
        raise UsageError(
            f"--ssl-certfile: {certificate} cannot be read as a certificate "
            f"({error.strerror or error}); name a PEM file"
        ) from error
    # A server's own certificate is as good as its issuer's, and on this machine it need not bear
    # the name of a loopback address.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not is_loopback(host)
    return context
