"""Memory held by a server and its child processes, from Linux's /proc."""

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_SESSION = 3  # index in the fields after the name: state, parent, group, session


def resident_bytes(session: int) -> int:
    """Memory of all processes of a session, in bytes; a page that they share counts once.

    This is the proportional set size: a shared page is divided among all processes that map it, so
    one shared with a process outside counts in part. 0 without such a session or without /proc.
    """
    return sum(_pss(process) for process in session_processes(session))


def session_processes(session: int) -> list[int]:
    """The ids of a session's processes."""
    return [
        int(folder.name)
        for folder in _PROC.glob("[0-9]*")
        if _session_of(folder / "stat") == session
    ]


def _session_of(stat: Path) -> int | None:
    """None for a process that has ended, or a zombie, which holds no memory any more."""
    with suppress(OSError):
        # The name is in brackets and may contain anything.
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[_SESSION])
    return None


def _pss(process: int) -> int:
    with suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
