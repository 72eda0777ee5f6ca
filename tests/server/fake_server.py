"""A few lines of HTTP server for the commands that talk to one."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Reply = tuple[int, bytes]


@dataclass
class Seen:
    """The requests to the server, in order."""

    url: str = ""
    port: int = 0
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)


@contextmanager
def serving(
    answer: Callable[[str, Any], Reply], *, read: Callable[[bytes], Any] = json.loads
) -> Iterator[Seen]:
    """`answer(path, body)` gives status and bytes; the connection closes after them.

    read: makes a body of its bytes.
    """
    seen = Seen()

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = read(self.rfile.read(length)) if length else None
            seen.paths.append(self.path)
            seen.headers.append({name.lower(): value for name, value in self.headers.items()})
            seen.bodies.append(body)
            status, data = answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = reply

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        seen.port = server.server_address[1]
        seen.url = f"http://127.0.0.1:{seen.port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()


def events(*chunks: object, done: bool = True) -> bytes:
    lines = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")
