"""A server to attack: what `ropewalk serve` starts, in a process of its own.

Its deadlines are short, so that what waits for one can be tried thousands of times.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.server.cli import main
from ropewalk.server.http import protocol
from tests.server.sockets import free_port
from tests.server.toy import wait_for

MODELS = ("ropewalk-rope", "ropewalk-t5", "ropewalk-alibi")
FLAGS = ("--kv-memory", "16MiB", "--threads", "1", "--no-access-log", "--max-queue", "512")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAILURE = re.compile(r" (ERROR|CRITICAL) |Traceback|Task exception was never retrieved")


class Hasty(protocol.Protocol):
    head_seconds = 0.4
    request_seconds = 0.8
    linger_seconds = 0.1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = 0.2


@dataclass(frozen=True, slots=True)
class Target:
    """A running server and what can be seen of it from outside."""

    port: int
    pid: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def leaks(self, files: int, seconds: float = 20) -> list[str]:
        """What is still held `seconds` after the last request; `files` were open at the start."""
        end = time.monotonic() + seconds
        while found := self._held(files):
            if time.monotonic() > end:
                return found
            time.sleep(0.1)
        return []

    def _held(self, files: int) -> list[str]:
        found = []
        for model in self.ask("/v1/cache")["data"]:
            blocks = model["blocks"]
            kept = {block for each in model["kept"] for block in each["blocks"]}
            if blocks["active"] != len(kept) or model["requests"] or model["waiting"]:
                found.append(f"{model['model']} holds {blocks['active']} blocks")
            if blocks["quarantined"] or model["audit"]["mutated"]:
                found.append(f"{model['model']} has blocks that changed")
        if self.open_files() > files:
            found.append(f"{self.open_files() - files} descriptors more than at the start")
        return found

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def failures(self, since: int) -> list[str]:
        """Lines of the log after the first `since` bytes that tell of a failure."""
        text = self.log.read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if FAILURE.search(line)]

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)


@contextmanager
def started(log: Path, models: Sequence[str] = MODELS) -> Iterator[Target]:
    port = free_port()
    template = log.with_suffix(".jinja")
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "tests.fuzz.target", "serve", *models, "--port", str(port)]
    command += ["--chat-template", str(template)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*command, *FLAGS], stdout=written, stderr=written, env=environment
        )
    try:
        target = Target(port, process.pid, log)
        wait_for(lambda: process.poll() is not None or _ready(target), 120)
        assert process.poll() is None, log.read_text()
        yield target
        process.terminate()
        assert process.wait(30) == 0, f"it ended with {process.returncode}: {log}"
    finally:
        process.kill()
        process.wait()


def _ready(target: Target) -> bool:
    try:
        return bool(target.ask("/health")["status"] == "ready")
    except OSError:
        return False


if __name__ == "__main__":
    protocol.Protocol = Hasty  # type: ignore[misc]
    sys.exit(main.main(sys.argv[1:]))
