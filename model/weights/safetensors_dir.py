"""Weights in safetensors files: one file, or shards listed by an index, in one folder.

The format is eight bytes of length, a JSON object, and the data. It is parsed here, because the
`safetensors` package maps the file (truncating a mapped file kills the process), accepts duplicate
tensor names, and takes seconds and a gigabyte for a million empty tensors.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.model.weights.base import (
    PICKLE_SUFFIXES,
    CheckpointError,
    advise_conversion,
    parse_json,
    read_json,
    read_range,
    refuse_mistaken,
    shown,
    size_of,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 8 << 20  # bytes; 10,000 tensors take about 2 MB
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8
# An I8 tensor NAME may have NAME.row_scale [rows], by which each row is multiplied.
ROW_SCALE = ".row_scale"

WEIGHT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class Entry(NamedTuple):
    """A tensor's entry in the header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    size: int  # bytes


class SafetensorsDirectory:
    """The safetensors weights of a folder; a WeightFile."""

    in_4_bits = False

    def __init__(self, folder: Path) -> None:
        """Read and check every header. Raises CheckpointError."""
        if (folder / SINGLE).exists():
            self._entries = read_header(folder / SINGLE)
        else:
            self._entries = _read_shards(folder)

    def names(self) -> frozenset[str]:
        """Names of weights: a row scale is part of the tensor that it belongs to."""
        scales = {name + ROW_SCALE for name, entry in self._entries.items() if entry.dtype == "I8"}
        return frozenset(self._entries.keys() - scales)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str, part: int | None = None) -> Tensor:
        entry = self._entries[name]
        if entry.dtype == "I8" and name + ROW_SCALE in self._entries:
            return self._expanded(name, part)
        dtype = WEIGHT_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{entry.path}: tensor {shown(name)} is stored as {entry.dtype}, "
                f"but weights must be one of {', '.join(WEIGHT_DTYPES)}."
            )
        return _data(entry, dtype, part)

    def _expanded(self, name: str, part: int | None) -> Tensor:
        """8-bit rows times their scales, in float32."""
        entry, scale = self._entries[name], self.read(name + ROW_SCALE)
        if scale.shape != entry.shape[:1]:
            raise CheckpointError(
                f"{entry.path}: tensor {shown(name)} has the shape {entry.shape}, which its row "
                f"scale of the shape {tuple(scale.shape)} does not fit."
            )
        rows = _data(entry, torch.int8, part).float()
        if part is not None:
            return rows * scale[part].float()
        return rows * scale.float().view(-1, *[1] * (rows.dim() - 1))


def _data(entry: Entry, dtype: torch.dtype, part: int | None = None) -> Tensor:
    shape, offset, size = entry.shape, entry.offset, entry.size
    if part is not None:
        size //= shape[0]
        shape, offset = shape[1:], offset + part * size
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(read_range(entry.path, offset, size), dtype=dtype).reshape(shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of one file. Raises CheckpointError unless the whole header is valid."""
    refuse_mistaken(path)
    file_size = size_of(path)
    if file_size < 8:
        raise CheckpointError(f"{path} is too short for a safetensors file; download it again.")
    length = int.from_bytes(read_range(path, 0, 8), "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header claims {length} bytes, "
            f"more than the {MAX_HEADER} allowed."
        )
    raw = bytes(read_range(path, 8, length))
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object.")
    header = parse_json(raw, f"{path}: header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(
            f"{path} lists {len(header)} tensors, more than the {MAX_TENSORS} allowed."
        )
    start = 8 + length
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    _check_layout(path, entries, start, file_size)
    return entries


def _entry(path: Path, name: str, value: object, start: int) -> Entry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise CheckpointError(f"{where} has the unknown dtype {shown(str(dtype))}.")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has a shape that is not a short list of sizes.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets that are not a pair of sizes.")
    begin, end = offsets
    if math.prod(shape) * ITEM_SIZES[dtype] != end - begin:
        raise CheckpointError(f"{where} has data_offsets that do not fit its dtype and shape.")
    return Entry(path, dtype, tuple(shape), start + begin, end - begin)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 48 for item in value
    )


def _check_layout(path: Path, entries: dict[str, Entry], start: int, file_size: int) -> None:
    """Require the tensors to fill the data exactly: no hole, no overlap, nothing after."""
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != position:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} leaves a hole or overlaps; download it again."
            )
        position += entry.size
    if position != file_size:
        raise CheckpointError(
            f"{path} has {file_size} bytes, but its header describes {position}; download it again."
        )


def _read_shards(folder: Path) -> dict[str, Entry]:
    index = folder / INDEX
    if not index.exists():
        raise CheckpointError(_nothing_to_read(folder))
    weight_map = read_json(index, MAX_HEADER).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} needs a weight_map from tensors to files.")
    entries: dict[str, Entry] = {}
    for shard in sorted({_shard_name(index, value) for value in weight_map.values()}):
        for name, entry in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{folder / shard} holds tensor {shown(name)}, "
                    f"which {INDEX} does not place there."
                )
            entries[name] = entry
    if missing := sorted(set(weight_map) - set(entries)):
        raise CheckpointError(f"{index} lists tensor {shown(missing[0])}, but no file holds it.")
    return entries


def _shard_name(index: Path, value: object) -> str:
    # The file may be a symlink (as in the hub's cache), but its name must not be a path.
    if not isinstance(value, str) or not value.endswith(".safetensors") or {*value} & {*"/\\\0"}:
        raise CheckpointError(
            f"{index} names {shown(str(value))}, which is not a safetensors file in this folder."
        )
    return value


def _nothing_to_read(folder: Path) -> str:
    unsafe = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLE_SUFFIXES)
    if unsafe:
        return (
            f"{folder} holds weights only as {shown(unsafe[0])}, a pickle that could run code, "
            f"so {advise_conversion(folder)}."
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}."
