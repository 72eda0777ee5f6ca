"""Whose the processor time was during a run: the server's, the client's, or somebody else's.

A core taken by other work costs far more than its share, so a figure without this is no figure.
Linux only; elsewhere, or without the server's process id, there is no answer.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # of the line `cpu` in /proc/stat: idle, iowait
_COUNTED_FIELDS = 8  # user … steal; guest time is part of user
_PPID, _UTIME, _STIME = 1, 11, 12  # fields of /proc/PID/stat after the command name


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Shares of the whole machine, 0 to 1."""

    server: float
    client: float
    other: float


@dataclass(frozen=True, slots=True)
class _Sample:
    wall: float  # all in seconds
    busy: float
    server: float
    client: float


class CpuMeter:
    """Started before a run and stopped after it."""

    def __init__(self, server_pid: int | None) -> None:
        self._server_pid = server_pid
        self._before = self._sample()

    def stop(self) -> CpuShares | None:
        before, after = self._before, self._sample()
        if before is None or after is None:
            return None
        capacity = (after.wall - before.wall) * (os.cpu_count() or 1)
        server = (after.server - before.server) / capacity
        client = (after.client - before.client) / capacity
        busy = (after.busy - before.busy) / capacity
        # The counters tick a hundred times a second: short runs can come out below nothing.
        return CpuShares(server, client, max(0.0, busy - server - client))

    def _sample(self) -> _Sample | None:
        if self._server_pid is None or not (_PROC / "stat").exists():
            return None
        return _Sample(
            time.perf_counter(), _machine_s(), _tree_s(self._server_pid), time.process_time()
        )


def _machine_s() -> float:
    fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1 : _COUNTED_FIELDS + 1]
    busy = sum(int(value) for index, value in enumerate(fields) if index not in _IDLE_FIELDS)
    return busy / os.sysconf("SC_CLK_TCK")


def _tree_s(root: int) -> float:
    """Processor seconds of a process and its living descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended between the listing and the reading
            continue
        fields = stat.rpartition(")")[2].split()
        parents[int(entry.name)] = int(fields[_PPID])
        ticks[int(entry.name)] = int(fields[_UTIME]) + int(fields[_STIME])
    total = sum(count for pid, count in ticks.items() if _descends(pid, root, parents))
    return total / os.sysconf("SC_CLK_TCK")


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root
