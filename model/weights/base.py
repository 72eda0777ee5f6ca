"""The interface to weight files, and how files are read that may be broken or hostile.

Such files are regular ones, bounded, and never mapped: truncating a mapped file kills the process
that reads it; with reads, it gives a short read. Knows tensors by their stored names, nothing of
any model.
"""

import json
import math
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Protocol

from torch import Tensor

MAX_DEPTH = 32
MAX_CONFIG = 1 << 20  # bytes
GGUF = b"GGUF"  # the first bytes of such a file
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class CheckpointError(Exception):
    """A file or folder that cannot be served; the message is one sentence that names it."""


class WeightFile(Protocol):
    """Stored tensors by name. The header is checked on opening, the data when it is read."""

    @property
    def in_4_bits(self) -> bool:
        """Whether it has 4-bit weights of a type that `--quantize int4` preserves."""
        ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, part: int | None = None) -> Tensor:
        """The tensor, or of its first dimension one part, in a floating dtype.

        In its own memory, never a view of the file.

        Raises CheckpointError when the file no longer holds it or it is not a weight.
        """
        ...


def shown(name: str) -> str:
    """A name from a file, made safe to print: quoted, escaped and short."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def open_regular(path: Path) -> FileIO:
    """Open for reading. Raises CheckpointError for anything but a readable regular file."""
    try:
        # Non-blocking, because opening a FIFO would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{path} cannot be opened: {reason}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return FileIO(descriptor)


def refuse_mistaken(path: Path) -> None:
    """Raises CheckpointError for what downloads leave in place of a file, unless there is none."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        start = file.read(512).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a Git-LFS pointer, which only names the real file; run `git lfs pull` in "
            "its folder or download the file itself."
        )
    if start.startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path} is an HTML page that was saved in place of the file; download it again, "
            "signed in if its site asks for that."
        )


def advise_conversion(folder: Path) -> str:
    """How transformers writes a folder of pickles anew; its config.json says which class can."""
    try:
        config = read_json(folder / "config.json", MAX_CONFIG)
    except CheckpointError:
        config = {}
    named = config.get("architectures")
    classes = [str(name) for name in named] if isinstance(named, list) else []
    both = config.get("is_encoder_decoder") is True or any(
        name.endswith(("ForConditionalGeneration", "T5WithLMHeadModel")) for name in classes
    )
    model = "AutoModelForSeq2SeqLM" if both else "AutoModelForCausalLM"
    return (
        f"convert it with transformers: {model}.from_pretrained(...).save_pretrained(...), then "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) into the same folder"
    )


def size_of(path: Path) -> int:
    """Bytes of a readable regular file. Raises CheckpointError for any other."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def read_range(path: Path, offset: int, size: int) -> bytearray:
    """Bytes offset .. offset + size of a file. Raises CheckpointError when it ends before."""
    with open_regular(path) as file:
        # Checked before allocating: the size may come from a false header.
        if offset + size > os.fstat(file.fileno()).st_size:
            raise CheckpointError(f"{path} ends early; download it again.")
        data = bytearray(size)
        view = memoryview(data)
        file.seek(offset)
        while view:
            count = file.readinto(view)
            if not count:
                raise CheckpointError(f"{path} ends early; download it again.")
            view = view[count:]
    return data


def refuse_large(path: Path, limit: int) -> None:
    """Raises CheckpointError for a file of more than `limit` bytes, unless there is none."""
    if path.is_file() and (size := path.stat().st_size) > limit:
        raise CheckpointError(f"{path} has {size} bytes, more than the {limit} allowed.")


def read_json(path: Path, limit: int) -> dict[str, object]:
    """A JSON object of at most `limit` bytes. Raises CheckpointError."""
    refuse_mistaken(path)
    return parse_json(read_all(path, limit), str(path))


def read_all(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes. Raises CheckpointError."""
    refuse_large(path, limit)
    return bytes(read_range(path, 0, size_of(path)))


def parse_json(data: bytes, where: str) -> dict[str, object]:
    """Strict: an object in UTF-8, no duplicate keys, no NaN or infinity. Raises CheckpointError."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
        _check(value, 0)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{where} is not valid JSON: {reason}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object.")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)} appears twice")
        result[key] = value
    return result


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def _check(value: object, depth: int) -> None:
    """Refuse what json accepts: deep nesting, and numbers such as 1e999."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it holds a number too large for a float")
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            _check(child, depth + 1)
