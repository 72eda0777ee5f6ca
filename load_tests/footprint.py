"""How much memory a server and all that it started hold, from Linux's /proc."""

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_SESSION = 3  # of the fields after the name: state, parent, group, session


def resident_bytes(session: int) -> int:
    """Memory of every process of a session, in bytes; a page that several share counts once.

    That is the proportional set size: a shared page is divided among all that have it, so a page
    that a process elsewhere has too counts in part. 0 where there is no such session, or no /proc.
    """
    return sum(_pss(process) for process in session_processes(session))


def session_processes(session: int) -> list[int]:
    """The processes that live in a session, by number."""
    return [
        int(folder.name)
        for folder in _PROC.glob("[0-9]*")
        if _session_of(folder / "stat") == session
    ]


def _session_of(stat: Path) -> int | None:
    """None for a process that is gone, or a zombie, which holds nothing any more."""
    with suppress(OSError):
        # The name is in brackets and may hold anything.
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[_SESSION])
    return None


def _pss(process: int) -> int:
    with suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
