"""Which of our files `ropewalk serve` imports, and which a prompt passes from socket to token.

    python -m tests.server.follow

prints both lists. The server is started as a user starts it, with a decoder of the family. A file
is passed when a function of it runs between the connection of a client and the end of its streamed
chat; the answer before that has filled every cache.
"""

import contextlib
import http.client
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("server/", "model/", "cache/", "load_tests/")
MODEL = "ropewalk-rope"
FLAGS = ("--kv-memory", "16MiB", "--threads", "1", "--no-access-log")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "

# What stands around a prompt's way: it inspects, counts and times, and changes nothing.
AROUND = {
    "cache/ledger.py",
    "model/encodings/common/cost.py",
    "model/watch.py",
    "model/weights/checksums.py",
    "server/engine/statistics.py",
    "server/engine/integrity.py",
    "server/http/access_log.py",
    "server/metrics/exporter.py",
}
# Inside the forward pass: the way of a key, not of a prompt.
INSIDE = (
    "model/attention/",
    "model/decoder.py",
    "model/encodings/",
    "model/kernels/",
    "model/layers/",
)


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
    sent = json.dumps({**body, "stream": True})
    connection.request("POST", "/v1/chat/completions", sent, headers)
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
    """Those of the packages, from the top folder, without the one sentence on each room."""
    found = {os.path.relpath(os.path.realpath(path), ROOT) for path in paths if path}
    here = [path for path in found if path.startswith(PACKAGES)]
    return sorted(path for path in here if not path.endswith("__init__.py"))


def on_the_way(passed: list[str]) -> list[str]:
    """Those that a reader follows from socket to token; the forward pass is one of them."""
    inside = {path for path in passed if path.startswith(INSIDE)}
    return [*sorted({*passed} - AROUND - inside), "the forward pass"]


def follow() -> tuple[list[str], list[str]]:
    """What is imported, and all that is passed."""
    follower, imported = Follower(), []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def talk() -> None:
        try:
            wait_until_ready(port)
            ask(port)
            time.sleep(0.5)
            follower.following = True
            ask(port)
            follower.following = False
            modules = list(sys.modules.values())
            imported.extend(getattr(module, "__file__", None) for module in modules)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=talk).start()  # before the profile: it is the client, not the server
    threading.setprofile(follower)
    sys.setprofile(follower)
    from ropewalk.server.cli.main import main

    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        command = ["serve", MODEL, "--port", str(port), "--chat-template", template.name, *FLAGS]
        with contextlib.redirect_stdout(io.StringIO()):
            main(command)
    sys.setprofile(None)
    # The main coroutine, of launch/, only waits for the server's end.
    return ours(imported), [path for path in ours(follower.passed) if "/launch/" not in path]


def main() -> None:
    imported, passed = follow()
    if "--json" in sys.argv:
        json.dump({"imported": imported, "passed": passed}, sys.stdout)
        return
    print(f"imported: {len(imported)}", *imported, sep="\n")
    print(f"\npassed: {len(passed)}", *passed, sep="\n")
    way = on_the_way(passed)
    print(f"\non a prompt's way: {len(way)}", *way, sep="\n")


if __name__ == "__main__":
    main()
