"""Reading with bounds."""

import os

import pytest

from ropewalk.model.weights.base import CheckpointError, open_regular, read_json, read_range


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b'{"a": [1, {"b": null}]}')
    return path


def test_ranges(path):
    assert read_range(path, 0, 4) == b'{"a"'
    assert read_range(path, 22, 1) == b"}"
    assert read_range(path, 23, 0) == b""
    for offset, size in ((22, 2), (23, 1), (1 << 40, 1), (0, 1 << 60)):
        with pytest.raises(CheckpointError, match=r"file\.json ends early"):
            read_range(path, offset, size)


def test_a_size_limit_at_its_edge(path):
    assert read_json(path, 23) == {"a": [1, {"b": None}]}
    with pytest.raises(CheckpointError, match="23 bytes, more than the 22 allowed"):
        read_json(path, 22)


def test_nesting_at_its_edge(path):
    path.write_text('{"a": ' + "[" * 31 + "]" * 31 + "}")
    assert "a" in read_json(path, 1000)
    path.write_text('{"a": ' + "[" * 32 + "1" + "]" * 32 + "}")
    with pytest.raises(CheckpointError, match="deeper than 32"):
        read_json(path, 1000)


def test_nothing_but_regular_files_and_no_descriptor_left(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    before = os.listdir("/proc/self/fd")
    for name in ("fifo", "loop", "absent", ".", "nul\0"):
        with pytest.raises(CheckpointError, match=r"not a regular file|cannot be opened"):
            open_regular(tmp_path / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_regular("/dev/zero")
    assert os.listdir("/proc/self/fd") == before
