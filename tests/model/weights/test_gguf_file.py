"""GGUF headers and tensors, against the package that defines the format."""

import os
import random
import struct

import gguf
import numpy as np
import pytest
import torch

from ropewalk.model.weights import gguf_file
from ropewalk.model.weights.base import CheckpointError
from ropewalk.model.weights.gguf_file import GGUFFile
from tests.model import refusals
from tests.model.checkpoints import finish

VALUES = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
KINDS = ["F32", "F16", "BF16", "F64", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]


def write(path, tensors=None, **fields):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        kind = gguf.GGUFValueType.get_type(value)
        sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub)
    for name, values in (tensors or {"a": VALUES}).items():
        writer.add_tensor(name, values)
    return finish(writer, path)


def refused(path, saying):
    assert str(path) in refusals.refused(saying, GGUFFile, path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_reads_as_the_package_reads_it(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    if kind is gguf.GGMLQuantizationType.F64:
        stored, expected = VALUES.astype(np.float64), VALUES.astype(np.float64)
    else:
        stored = gguf.quants.quantize(VALUES, kind)
        expected = gguf.quants.dequantize(stored, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("before", VALUES[0, :7])  # so that padding follows
    writer.add_tensor("a", stored, raw_dtype=kind)
    weights = GGUFFile(finish(writer, tmp_path / "x.gguf"))
    assert weights.names() == {"before", "a"}
    assert weights.shape("a") == (6, 256)
    assert torch.equal(weights.read("a").to(torch.float64), torch.from_numpy(expected).double())
    assert torch.equal(weights.read("before"), torch.from_numpy(VALUES[0, :7]))


def test_metadata_are_plain_values(tmp_path):
    fields = {
        "text": "Größe",
        "flag": True,
        "small": 7,
        "number": 0.5,
        "texts": ["a", "", "ü"],
        "numbers": [1, 2, 3],
        "reals": [0.25, -1.0],
    }
    metadata = GGUFFile(write(tmp_path / "x.gguf", **fields)).metadata
    assert metadata == {"general.architecture": "llama"} | fields
    assert {type(value) for value in metadata.values()} <= {str, bool, int, float, list}


def test_what_was_read_survives_the_file(tmp_path):
    weights = GGUFFile(write(tmp_path / "x.gguf"))
    tensor = weights.read("a")
    os.truncate(tmp_path / "x.gguf", 100)
    assert torch.equal(tensor, torch.from_numpy(VALUES))
    with pytest.raises(CheckpointError, match="ends early"):
        weights.read("a")


def string(text):
    return struct.pack("<Q", len(text)) + text


def header(tensors=0, keys=0, version=3, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def info(name=b"a", shape=(4,), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


BROKEN = {
    "empty": (b"", "ends early"),
    "other magic": (b"GGML" + b"\0" * 100, "does not start with GGUF"),
    "old version": (header(version=1), "version 1"),
    "big endian": (header(version=3 << 24), "version"),
    "cut preamble": (header()[:20], "ends early"),
    "too many tensors": (header(tensors=10_001), "10001 tensors"),
    "too many keys": (header(keys=2**64 - 1), "metadata keys"),
    "key beyond the end": (header(keys=1, rest=struct.pack("<Q", 500)), "ends early"),
    "key of 2**60 bytes": (header(keys=1, rest=struct.pack("<Q", 2**60)), "bytes of text"),
    "key not UTF-8": (header(keys=1, rest=string(b"\xff\xfe")), "not UTF-8"),
    "unknown value": (header(keys=1, rest=string(b"k") + b"\x63\0\0\0"), "value type 99"),
    # The package's own reader never returns from this one.
    "endless array": (
        header(keys=1, rest=string(b"k") + struct.pack("<IIQ", 9, 4, 2**60)),
        "array items",
    ),
    "array beyond the end": (
        header(keys=1, rest=string(b"k") + struct.pack("<IIQ", 9, 4, 4000)),
        "ends early",
    ),
    "array of arrays": (
        header(keys=1, rest=string(b"k") + struct.pack("<IIQ", 9, 9, 1)),
        "nests arrays",
    ),
    "key twice": (
        header(keys=2, rest=2 * (string(b"k") + struct.pack("<IB", 7, 1))),
        "'k' appears twice",
    ),
    "tensor twice": (header(tensors=2, rest=2 * info()), "'a' appears twice"),
    "unknown type": (header(tensors=1, rest=info(kind=250)), "unknown type 250"),
    **{
        f"removed type {number}": (
            header(tensors=1, rest=info(kind=number)),
            f"uses the quantisation {name}, which was removed .*use a file in Q4_0",
        )
        for number, name in ((4, "Q4_2"), (5, "Q4_3"), (31, "Q4_0_4_4"), (38, "IQ4_NL_8_8"))
    },
    "no dimensions": (header(tensors=1, rest=info(shape=())), "cannot be stored"),
    "zero dimension": (header(tensors=1, rest=info(shape=(0, 4))), "cannot be stored"),
    "five dimensions": (header(tensors=1, rest=info(shape=(1,) * 5)), "5 dimensions"),
    "overflowing shape": (header(tensors=1, rest=info(shape=(2**40, 2**40))), "cannot be stored"),
    "half a block": (header(tensors=1, rest=info(shape=(16, 2), kind=8)), "cannot be stored"),
    "not aligned": (header(tensors=1, rest=info(offset=4) + b"\0" * 200), "not aligned"),
    "overlapping": (
        header(tensors=2, rest=info(shape=(32,)) + info(b"b", offset=64) + b"\0" * 500),
        "overlaps",
    ),
    "data missing": (header(tensors=1, rest=info(shape=(4000,)) + b"\0" * 200), "ends before"),
    "offset beyond": (header(tensors=1, rest=info(offset=2**62)), "ends before"),
    "alignment": (
        header(keys=1, rest=string(b"general.alignment") + struct.pack("<II", 4, 33)),
        "power of two",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name, tmp_path):
    content, saying = BROKEN[name]
    (tmp_path / "x.gguf").write_bytes(content)
    refused(tmp_path / "x.gguf", saying)


def test_header_limit(tmp_path, monkeypatch):
    path = write(tmp_path / "x.gguf", texts=["word"] * 1000)
    assert len(GGUFFile(path).metadata) == 2
    monkeypatch.setattr(gguf_file, "MAX_HEADER", 4096)
    refused(path, "ends early")


def test_every_truncation(tmp_path):
    path = write(tmp_path / "x.gguf", {"a": VALUES[:, :8]}, text="some text")
    content = path.read_bytes()
    for size in range(len(content) - 1):
        path.write_bytes(content[:size])
        refused(path, "ends|too short")


def test_a_type_that_cannot_be_dequantised(tmp_path):
    kind = gguf.GGMLQuantizationType.I32
    (tmp_path / "x.gguf").write_bytes(header(tensors=1, rest=info(kind=int(kind)) + b"\0" * 200))
    weights = GGUFFile(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="I32, which cannot be read"):
        weights.read("a")


@pytest.mark.parametrize("seed", range(50))
def test_flipped_bytes(seed, tmp_path):
    """Damage is refused, or leaves tensors that can be read."""
    rng = random.Random(seed)
    fields = {"text": "some text", "texts": ["a", "b"], "numbers": [1, 2], "number": 0.5}
    path = write(tmp_path / "x.gguf", {"a": VALUES[:2, :32], "b": VALUES[0, :9]}, **fields)
    raw = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        raw[rng.randrange(400)] = rng.randrange(256)
    path.write_bytes(raw)
    try:
        weights = GGUFFile(path)
        for name in weights.names():
            assert tuple(weights.read(name).shape) == weights.shape(name)
    except CheckpointError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)
