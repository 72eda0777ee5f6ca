"""A file that a command writes. Errors are one sentence."""

from pathlib import Path

from ropewalk.server.errors import CommandError


def require_folder(path: Path) -> None:
    """Call before the work, not after it. Raises CommandError."""
    if not path.parent.is_dir():
        raise CommandError(
            f"{path} cannot be written: {path.parent} is not a directory; choose another path"
        )


def write_file(path: Path, content: str | bytes) -> None:
    """Raises CommandError."""
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise CommandError(
            f"{path} cannot be written ({error.strerror}); choose another file"
        ) from error
