"""Headers that lie, files that are cut, folders that point elsewhere."""

import json
import math
import os
import random

import pytest
import torch
from safetensors.torch import save_file

from ropewalk.model.weights import safetensors_dir
from ropewalk.model.weights.base import CheckpointError
from ropewalk.model.weights.safetensors_dir import INDEX, SINGLE, SafetensorsDirectory
from tests.model import refusals

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(folder, header, data=b"\0" * 16, length=None):
    """A file of this header (bytes, or an object to encode) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = (len(raw) if length is None else length).to_bytes(8, "little")
    (folder / SINGLE).write_bytes(prefix + raw + data)
    return folder


def refused(folder, saying):
    """In a sentence that names a file of the folder."""
    assert str(folder) in refusals.refused(saying, SafetensorsDirectory, folder)


def test_reads_what_the_library_writes(tmp_path):
    tensors = {
        "f64": torch.randn(3, 5, dtype=torch.float64),
        "f32": torch.randn(4),
        "f16": torch.randn(2, 3, 4).half(),
        "bf16": torch.randn(7, 1).bfloat16(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    weights = SafetensorsDirectory(tmp_path)
    assert weights.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert weights.read(name).dtype == tensor.dtype
        assert torch.equal(weights.read(name), tensor)


def test_what_was_read_survives_the_file(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / SINGLE)
    weights = SafetensorsDirectory(tmp_path)
    tensor = weights.read("a")
    os.truncate(tmp_path / SINGLE, 100)
    assert tensor.sum() == 1000
    with pytest.raises(CheckpointError, match="ends early"):
        weights.read("a")


@pytest.mark.parametrize(
    ("content", "saying"),
    [
        (b"", "too short"),
        (b"\1\2\3\4", "too short"),
        ((2**63).to_bytes(8, "little"), "claims"),
        ((2**64 - 1).to_bytes(8, "little"), "claims"),
        ((100).to_bytes(8, "little") + b"{}", "ends early"),
        ((safetensors_dir.MAX_HEADER + 1).to_bytes(8, "little"), "claims"),
        ((0).to_bytes(8, "little"), "not a JSON object"),
        ((3).to_bytes(8, "little") + b" {}", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"{]", "not valid JSON"),
        ((4).to_bytes(8, "little") + b'{"\xff\xfe', "not valid JSON"),
    ],
)
def test_broken_beginnings(content, saying, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    refused(tmp_path, saying)


def test_a_huge_claim_allocates_nothing(tmp_path):
    with open(tmp_path / SINGLE, "wb") as file:
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate(200 << 20)  # sparse
    refused(tmp_path, "claims")


@pytest.mark.parametrize(
    ("header", "saying"),
    [
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested"),
        (b'{"a":{"dtype":"F32"},"a":{}}', "twice"),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', "NaN"),
        (b'{"a":1e999}', "too large"),
        ({"a": 5}, "exactly"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "exactly"),
        ({"a": ENTRY | {"more": 1}}, "exactly"),
        ({"a": ENTRY | {"dtype": "Q9"}}, "unknown dtype"),
        ({"a": ENTRY | {"dtype": ["F32"]}}, "unknown dtype"),
        ({"a": ENTRY | {"shape": [-2, -2]}}, "shape"),
        ({"a": ENTRY | {"shape": [2.0, 2.0]}}, "shape"),
        ({"a": ENTRY | {"shape": [True, 4]}}, "shape"),
        ({"a": ENTRY | {"shape": [4] + [1] * 8}}, "shape"),
        ({"a": ENTRY | {"shape": [0, 2**62]}}, "shape"),
        ({"a": ENTRY | {"shape": [2**32, 2**32]}}, "do not fit"),
        ({"a": ENTRY | {"data_offsets": [16, 0]}}, "do not fit"),
        ({"a": ENTRY | {"data_offsets": [-16, 0]}}, "offsets"),
        ({"a": ENTRY | {"data_offsets": [0, 8]}}, "do not fit"),
        ({"a": ENTRY | {"data_offsets": [0]}}, "pair"),
        ({"a": ENTRY | {"data_offsets": [16, 32]}}, "hole"),
        ({"a": ENTRY, "b": ENTRY}, "overlaps"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [16, 32]}}, "describes"),
        ({}, "describes"),
    ],
)
def test_broken_headers(header, saying, tmp_path):
    refused(write(tmp_path, header), saying)


def test_trailing_bytes_and_truncation(tmp_path):
    refused(write(tmp_path, {"a": ENTRY}, b"\0" * 17), "describes")
    refused(write(tmp_path, {"a": ENTRY}, b"\0" * 15), "describes")


def test_the_number_of_tensors_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_dir, "MAX_TENSORS", 1000)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    limit = safetensors_dir.MAX_TENSORS
    header = {str(index): empty for index in range(limit)}
    assert len(SafetensorsDirectory(write(tmp_path, header, b"")).names()) == limit
    refused(write(tmp_path, header | {"more": empty}, b""), "more than the 1000 allowed")


def test_part_of_a_tensor_is_read_alone(tmp_path):
    """Of 8-bit rows as well, whose scales are those of the first dimension."""
    whole = torch.arange(24.0).view(3, 2, 4)
    stored = {"a": whole, "b": whole.to(torch.int8), "b.row_scale": torch.tensor([1.0, 2.0, 3.0])}
    save_file(stored, tmp_path / "model.safetensors")
    weights = SafetensorsDirectory(tmp_path)
    for name in ("a", "b"):
        for part in range(3):
            found = weights.read(name, part)
            assert torch.equal(found, weights.read(name)[part])
            assert found.untyped_storage().nbytes() == found.nbytes


def test_names_are_shown_escaped_and_short(tmp_path):
    refused(write(tmp_path, {"../../x\n\x1b[31m" + "y" * 5000: 5}), r"\.\./\.\./x\\n")


def test_integers_are_no_weights(tmp_path):
    save_file({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / SINGLE)
    weights = SafetensorsDirectory(tmp_path)
    with pytest.raises(CheckpointError, match="stored as I64"):
        weights.read("a")


def shards(folder, weight_map=None):
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "two.safetensors")
    default = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map or default}))
    return folder


def test_shards(tmp_path):
    weights = SafetensorsDirectory(shards(tmp_path))
    assert weights.names() == {"a", "b"}
    assert weights.read("a").tolist() == [1, 1]
    assert weights.read("b").tolist() == [0, 0, 0]


def test_a_snapshot_of_links_into_a_blob_folder(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    for name in ("one.safetensors", "two.safetensors", INDEX):
        shards(blobs)
        (blobs / name).rename(blobs / f"digest-{name}")
        (snapshot / name).symlink_to(f"../blobs/digest-{name}")
    assert SafetensorsDirectory(snapshot).read("a").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("weight_map", "saying"),
    [
        ({"a": "../one.safetensors"}, "not a safetensors file in this folder"),
        ({"a": "/etc/passwd"}, "not a safetensors file in this folder"),
        ({"a": "sub\\one.safetensors"}, "not a safetensors file in this folder"),
        ({"a": "one.bin"}, "not a safetensors file in this folder"),
        ({"a": "one\0.safetensors"}, "not a safetensors file in this folder"),
        ({"a": 5}, "not a safetensors file in this folder"),
        ({"a": "three.safetensors"}, "No such file"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "does not place there"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "no file holds it"),
        ({"b": "one.safetensors"}, "does not place there"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "does not place there"),
        ([], "weight_map"),
    ],
)
def test_indices_that_mislead(weight_map, saying, tmp_path):
    shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, saying)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_way_out(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    refused(tmp_path, "pickle that could run code.*save_pretrained")


def test_an_empty_folder(tmp_path):
    refused(tmp_path, "neither")


def test_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / SINGLE)
    refused(tmp_path, "not a regular file")
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    refused(tmp_path, "not a regular file")


@pytest.mark.parametrize("seed", range(50))
def test_flipped_bytes(seed, tmp_path):
    """A damaged header is refused, or still describes tensors that can be read."""
    rng = random.Random(seed)
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(5).half()}, tmp_path / SINGLE)
    raw = bytearray((tmp_path / SINGLE).read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(rng.randint(1, 3)):
        raw[rng.randrange(header)] = rng.randrange(256)
    (tmp_path / SINGLE).write_bytes(raw)
    try:
        weights = SafetensorsDirectory(tmp_path)
        for name in weights.names():
            assert weights.read(name).numel() == math.prod(weights.shape(name))
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
        assert "\n" not in str(error)
