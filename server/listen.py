"""The listening socket, bound before a model is loaded so that a taken port is reported at once.

Also TLS for it, and the address at which a program on the same machine reaches it. Knows no HTTP.
"""

import errno
import fcntl
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ropewalk.server.errors import CommandError

_REASONS = {
    errno.EADDRINUSE: "another program is using this port; stop it or choose another --port",
    errno.EACCES: "this user may not use this port; choose a --port of 1024 or more",
    errno.EADDRNOTAVAIL: "this machine has no such address; use --host 127.0.0.1 or 0.0.0.0",
}


@contextmanager
def bound(host: str, port: int, path: Path | None) -> Iterator[socket.socket]:
    """A socket bound to `path`, or to host and port; at the end closed, and `path` removed."""
    if path is None:
        with bind(host, port) as listener:
            yield listener
        return
    with _held(path), bind_unix(path) as listener:
        made = path.stat().st_ino
        try:
            yield listener
        finally:
            if path.exists() and path.stat().st_ino == made:  # nobody has replaced it
                path.unlink()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Locks a file beside the socket: while models load, nothing answers at the socket itself."""
    beside = path.with_name(f"{path.name}.lock")
    try:
        lock = beside.open("w")
    except OSError as error:
        raise CommandError(
            f"cannot listen on {path}: {error.strerror}; choose another --uds"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(path) from error
        try:
            same = os.path.samestat(beside.stat(), os.fstat(lock.fileno()))
        except FileNotFoundError:
            same = False
        if not same:  # it was in use until just now, by whom this file was removed
            raise _in_use(path)
        try:
            yield
        finally:
            beside.unlink(missing_ok=True)


def _in_use(path: Path) -> CommandError:
    return CommandError(
        f"cannot listen on {path}: another program is using this socket; stop it or choose "
        "another --uds"
    )


def bind_unix(path: Path) -> socket.socket:
    """A bound Unix socket that does not listen yet; the umask decides who may connect.

    Replaces the socket of a server that is gone. Raises CommandError with the reason.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        # A path that is too long has no number, only a message.
        reason = error.strerror or "the path is too long for a socket"
        raise CommandError(f"cannot listen on {path}: {reason}; choose another --uds") from error
    except CommandError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise CommandError(f"cannot listen on {path}: it is not a socket; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise _in_use(path)


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """For a server with this certificate chain; without `key` it is in the same file."""

    def no_password() -> str:
        raise CommandError(
            f"the private key in {key or certificate} is encrypted; decrypt it, for example with "
            "openssl pkey"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_password)
    except OSError as error:
        names = f"{certificate} and {key}" if key else f"{certificate}"
        reason = getattr(error, "reason", None) or error.strerror or "not PEM"
        reason = re.sub(r"\s*\(_?ssl.c:\d+\)", "", reason)
        raise CommandError(
            f"TLS is not possible with {names} ({reason.replace('_', ' ').lower()}); name a "
            "certificate and its private key as PEM files"
        ) from error
    return context


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises CommandError with the reason."""
    where = f"cannot listen on {origin(host, port)}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CommandError(
            f"{where}: the name does not resolve; use --host 127.0.0.1 or 0.0.0.0"
        ) from error
    listener = socket.socket(family, kind, protocol)
    # Connections left by a server that was just stopped must not block the next one.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(
            error.errno or 0, f"{error.strerror}; choose another --host or --port"
        )
        raise CommandError(f"{where}: {reason}") from error
    return listener


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host.lower() == "localhost"


def local_url(host: str, port: int, *, tls: bool = False) -> str:
    """Where a program on this machine finds a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return origin(reachable, port, tls=tls)


def origin(host: str, port: int, *, tls: bool = False) -> str:
    """http://host:port, an IPv6 address in brackets."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
