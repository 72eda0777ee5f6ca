"""How much memory programs can have: what the machine has left, within a container's limit.

The server reckons alike (server/hardware.py), but load tests over HTTP import nothing of it.
"""

import os
from contextlib import suppress
from pathlib import Path

MACHINE = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# Limit, usage, statistics and what counts as usage but is given up first, in cgroup v2 and v1.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_memory() -> int:
    """Bytes; pages of files that were read are free, as they are given up for programs."""
    try:
        free = _number_after("MemAvailable:", MACHINE) << 10
    except (OSError, ValueError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used, statistics, given_up in _FILES:
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            left = int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
            with suppress(OSError, ValueError):
                left += _number_after(given_up, CGROUP / statistics)
            free = min(free, max(left, 0))
    return free


def _number_after(word: str, path: Path) -> int:
    """Raises OSError and ValueError."""
    words = path.read_text().split()
    return int(words[words.index(word) + 1])
