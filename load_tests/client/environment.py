"""Where and with what a load test ran, for result.json: machine, commit, versions of servers."""

import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ropewalk.load_tests.client.client import Server, Unreachable, get_json

_HERE = Path(__file__).resolve().parent


async def environment(servers: Iterable[Server]) -> dict[str, object]:
    """Facts about this machine and each server; None for what is unknown."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "commit": _commit(),
        "versions": {server.url: await _version(server) for server in servers},
    }


async def _version(server: Server) -> str | None:
    """`/version`, which vLLM has too."""
    with suppress(Unreachable):
        answer = await get_json(server, "/version")
        if isinstance(answer, dict) and "version" in answer:
            return str(answer["version"])
    return None


def _commit() -> str | None:
    """The commit of this checkout, with -dirty if files differ."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, cwd=_HERE, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()
    return None


def _processor() -> str:
    """The processor's model name, where the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
