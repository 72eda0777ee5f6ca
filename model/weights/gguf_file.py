"""Weights in a GGUF file, dequantised by the `gguf` package as they are read.

The header is parsed here: the package's own reader maps the file, trusts array lengths (with a
wrong one it never returns) and takes seconds for a large vocabulary.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from torch import Tensor

from ropewalk.model.weights.base import GGUF, CheckpointError, read_range, shown, size_of

MAX_HEADER = 64 << 20  # bytes; a vocabulary of 256,000 takes about 15 MB
MAX_ENTRIES = 10_000  # metadata keys, and tensors
MAX_ITEMS = 1 << 22  # of all arrays together; a vocabulary of 256,000 has some 1,300,000
MAX_DIMENSIONS = 4

# struct's format characters; all values are little-endian.
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
# Types whose groups of 32 values have their own scale and least value.
IN_4_BITS = {GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K}
REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
NO_UTF_8 = "it holds text that is not UTF-8"


class Entry(NamedTuple):
    """A tensor's entry in the header."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in torch
    offset: int  # in the file
    size: int  # bytes


class GGUFFile:
    """A WeightFile, and the file's own metadata by their keys."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises CheckpointError."""
        self.path = path
        file_size = size_of(path)
        cursor = _Cursor(path, read_range(path, 0, min(file_size, MAX_HEADER)))
        tensors, keys = _preamble(cursor)
        self.metadata: Mapping[str, object] = _read_metadata(cursor, keys)
        self._entries = _read_entries(cursor, tensors, self.metadata, file_size)

    @property
    def in_4_bits(self) -> bool:
        return any(entry.kind in IN_4_BITS for entry in self._entries.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, part: int | None = None) -> Tensor:
        """In float32 unless stored as float16 or float64."""
        entry = self._entries[name]
        shape, offset, size = entry.shape, entry.offset, entry.size
        if part is not None:
            size //= shape[0]  # whole rows, so whole blocks
            shape, offset = shape[1:], offset + part * size
        data = np.frombuffer(read_range(self.path, offset, size), dtype=np.uint8)
        if entry.kind is GGMLQuantizationType.F64:
            return torch.from_numpy(data.view(np.float64)).reshape(shape)
        if entry.kind is GGMLQuantizationType.F16:
            return torch.from_numpy(data.view(np.float16)).reshape(shape)
        return torch.from_numpy(_dequantise(self.path, entry.kind, data)).reshape(shape)


def _dequantise(path: Path, kind: GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
    """Bytes of whole blocks → float32, flat."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # In rows of many blocks, because the package processes a few rows at a time.
    blocks = len(data) // block_bytes
    row = math.gcd(blocks, 256)
    try:
        # Broken scales overflow; the check for finite weights reports them later.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(data.reshape(-1, row * block_bytes), kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path} uses the quantisation {kind.name}, which cannot be read here; "
            "use a file in F32, F16, BF16, Q8_0 or one of the K types."
        ) from error
    return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)


class _Cursor:
    """Reads forward through the header's bytes; raises CheckpointError at their end."""

    def __init__(self, path: Path, data: bytes | bytearray) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.items = 0  # of arrays, so far

    def broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is a broken GGUF file: {reason}; download it again.")

    def take(self, size: int) -> bytes | bytearray:
        end = self.position + size
        if end > len(self.data):
            raise self.broken("its header ends early")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def scalar(self, letter: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))
        return value

    def size(self, letter: str, limit: int, what: str) -> int:
        value = int(self.scalar(letter))
        if value > limit:
            raise self.broken(f"it claims {value} {what}, more than the {limit} allowed")
        return value

    def text(self) -> str:
        data = self.take(self.size("Q", MAX_HEADER, "bytes of text"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(NO_UTF_8) from error

    def texts(self, count: int) -> list[str]:
        """As many calls of `text`, sooner: a vocabulary and its merges are some 100,000."""
        data, found = self.data, []
        for _ in range(count):
            start = self.position + 8
            end = start + int.from_bytes(data[self.position : start], "little")
            if end > len(data):
                found.append(self.text())  # raises, with the reason
            try:
                found.append(data[start:end].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self.broken(NO_UTF_8) from error
            self.position = end
        return found

    def value_type(self) -> GGUFValueType:
        number = int(self.scalar("I"))
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.broken(f"it uses the unknown value type {number}") from error

    def value(self) -> object:
        kind = self.value_type()
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(SCALARS[kind])
        item = self.value_type()
        count = self.size("Q", MAX_ITEMS - self.items, "array items")
        self.items += count
        if item is GGUFValueType.STRING:
            return self.texts(count)
        if item is GGUFValueType.ARRAY:
            raise self.broken("it nests arrays")
        layout = f"<{count}{SCALARS[item]}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version → numbers of tensors and of metadata keys."""
    if cursor.take(4) != GGUF:
        raise CheckpointError(f"{cursor.path} is not a GGUF file: it does not start with GGUF.")
    version = int(cursor.scalar("I"))
    if version not in (2, 3):
        raise CheckpointError(
            f"{cursor.path} is GGUF of version {version}, but only little-endian files "
            "of version 2 and 3 can be read; convert the model again."
        )
    tensors = cursor.size("Q", MAX_ENTRIES, "tensors")
    return tensors, cursor.size("Q", MAX_ENTRIES, "metadata keys")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise cursor.broken(f"the key {shown(key)} appears twice")
        metadata[key] = cursor.value()
    return metadata


def _read_entries(
    cursor: _Cursor, count: int, metadata: Mapping[str, object], file_size: int
) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for _ in range(count):
        name = cursor.text()
        if name in entries:
            raise cursor.broken(f"tensor {shown(name)} appears twice")
        entries[name] = _read_entry(cursor, name)
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
        raise cursor.broken("general.alignment is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    placed = {name: entry._replace(offset=start + entry.offset) for name, entry in entries.items()}
    _check_layout(cursor, placed, alignment, file_size)
    return placed


def _read_entry(cursor: _Cursor, name: str) -> Entry:
    dimensions = cursor.size("I", MAX_DIMENSIONS, "dimensions")
    # GGUF lists the fastest dimension first.
    shape = tuple(int(cursor.scalar("Q")) for _ in range(dimensions))[::-1]
    number = int(cursor.scalar("I"))
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        if number in REMOVED_TYPES:
            raise CheckpointError(
                f"{cursor.path} uses the quantisation {REMOVED_TYPES[number]}, which was removed "
                "from the GGUF format; use a file in Q4_0 or one of the K types."
            ) from error
        raise cursor.broken(f"tensor {shown(name)} has the unknown type {number}") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if not 0 < elements < 1 << 48 or not shape or shape[-1] % block:
        raise cursor.broken(f"tensor {shown(name)} has a shape that cannot be stored")
    return Entry(kind, shape, int(cursor.scalar("Q")), elements // block * block_bytes)


def _check_layout(
    cursor: _Cursor, entries: Mapping[str, Entry], alignment: int, file_size: int
) -> None:
    """Require every tensor to be aligned, inside the file, and not to overlap others."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset % alignment or entry.offset < position:
            raise cursor.broken(f"tensor {shown(name)} overlaps another or is not aligned")
        position = entry.offset + entry.size
        if position > file_size:
            raise cursor.broken(f"it ends before the data of tensor {shown(name)}")
