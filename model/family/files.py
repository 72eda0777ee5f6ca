"""Files that are there in full or not at all, and folders that one process at a time works in."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from model.family.errors import FamilyError
from model.saving import flush


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what `path` is to hold: a name beside it, which takes its place at the end.

    It is on the disk by then, so that a power failure leaves the one or the other. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        flush(partial)
        os.replace(partial, path)
    except SafetensorError as error:  # how that library tells of a full disk
        raise OSError(0, str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Made if it is missing. Raises FamilyError when another process works in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FamilyError(
                f"another process works in {folder}; wait until it has ended, or set "
                "ROPEWALK_HOME to another folder"
            ) from error
        yield


def put(made: Path, folder: Path) -> None:
    """A folder that is complete takes the place of one from before. Raises OSError."""
    if folder.exists():
        shutil.rmtree(folder)
    made.rename(folder)
