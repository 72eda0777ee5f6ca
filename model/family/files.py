"""Files that are written in full or not at all, and folders used by one process at a time."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ropewalk.model.family.errors import FamilyError
from ropewalk.model.loading.save import flush


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write the new content of `path`: a file beside it that replaces it at the end.

    It is flushed before that, so a power failure leaves one or the other. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        flush(partial)
        os.replace(partial, path)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(0, str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks `folder`, created if missing. Raises FamilyError if another process works in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FamilyError(
                f"another process is using {folder}; wait until it ends, or set "
                "ROPEWALK_HOME to another folder"
            ) from error
        yield


def put(made: Path, folder: Path) -> None:
    """Replace a folder by a complete one. Raises OSError."""
    if folder.exists():
        shutil.rmtree(folder)
    made.rename(folder)
