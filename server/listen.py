"""The listening socket, bound before a model is loaded so that a taken port is reported at once.

Also the address at which a program on the same machine reaches it. Knows no HTTP.
"""

import errno
import socket

from server.errors import CommandError

_REASONS = {
    errno.EADDRINUSE: "another program is using this port; stop it or choose another --port",
    errno.EACCES: "this user may not use this port; choose a --port of 1024 or more",
    errno.EADDRNOTAVAIL: "this machine has no such address; use --host 127.0.0.1 or 0.0.0.0",
}


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


def reachable(host: str) -> str:
    """The host to connect to for a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def local_url(host: str, port: int) -> str:
    """Where a program on this machine finds a server that listens on `host`."""
    return origin(reachable(host), port)


def origin(host: str, port: int) -> str:
    """http://host:port, an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
