"""Which files `ropewalk serve` imports, and which a prompt passes from socket to streamed token.

Run as `python -m tests.server.follow`: prints JSON. The server is started as a user starts it, with
a decoder of the family. A file is passed when a function of it runs between the connection of a
client and the end of its streamed chat; one answer before that has filled every cache.
"""

import contextlib
import http.client
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.server.sockets import free_port

ROOT = Path(__file__).parents[2]
MODEL = "ropewalk-rope"
FLAGS = ("--kv-memory", "16MiB", "--threads", "1", "--no-access-log")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Follower:
    """Notes the files whose functions run, in any thread, while `following`."""

    def __init__(self) -> None:
        self.following = False
        self.passed: set[str] = set()

    def __call__(self, frame, event, _) -> None:
        if self.following and event == "call":
            self.passed.add(frame.f_code.co_filename)


def ask(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 8}
    headers = {"Content-Type": "application/json"}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers
    )
    answer = connection.getresponse().read()
    connection.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer


def wait_until_ready(port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise AssertionError("the server is not ready")


def ours(paths) -> list[str]:
    """Those of the packages, from the top folder."""
    found = {os.path.realpath(path) for path in paths if path}
    here = [os.path.relpath(path, ROOT) for path in found if path.startswith(f"{ROOT}/")]
    return sorted(path for path in here if not path.startswith(("tests/", ".venv")))


def main() -> None:
    follower, imported, port = Follower(), [], free_port()

    def follow() -> None:
        try:
            wait_until_ready(port)
            ask(port)
            time.sleep(0.5)
            follower.following = True
            ask(port)
            follower.following = False
            imported.extend(getattr(module, "__file__", "") for module in sys.modules.values())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow).start()  # before the profile: it is the client, not the server
    threading.setprofile(follower)
    sys.setprofile(follower)
    from ropewalk.server.cli.main import main as ropewalk

    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        command = ["serve", MODEL, "--port", str(port), "--chat-template", template.name, *FLAGS]
        with contextlib.redirect_stdout(io.StringIO()):
            ropewalk(command)
    sys.setprofile(None)
    json.dump({"imported": ours(imported), "passed": ours(follower.passed)}, sys.stdout)


if __name__ == "__main__":
    main()
