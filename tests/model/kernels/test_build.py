"""The library is built once, kept, and missed with a reason."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ropewalk.model.kernels.cpu.bindings import load
from ropewalk.model.kernels.cpu.library import SOURCES, UNUSED_S, NoKernels, library

RUNS = len(SOURCES) + 1  # of the compiler: each source, and all together


def compiler(folder, script):
    """A stand-in for g++ that runs `script` and notes each compilation."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo ran >> {folder}/ran\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def copying(tmp_path, kernels, monkeypatch):
    """For a compiler, one that takes its time to copy what was compiled before."""
    built = kernels._library._name
    script = '[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.2\n'
    monkeypatch.setenv("CXX", compiler(tmp_path, f'{script}cp {built} "$2"'))


def kept(folder):
    return list(folder.glob("*.so"))


def test_it_is_compiled_once(tmp_path, copying):
    weight = torch.randn(5, 4)
    for _ in range(2):
        assert load(tmp_path / "kernels").pack(weight).any()
    assert (tmp_path / "ran").read_text() == "ran\n" * RUNS


def test_a_compiler_with_arguments(tmp_path, copying, monkeypatch):
    """As CXX="ccache g++" names one."""
    compiler = os.environ["CXX"]
    for first in ("NOTHING", "OTHERS"):
        monkeypatch.setenv("CXX", f"env -u {first} {compiler}")
        assert load(tmp_path / "kernels").pack(torch.ones(1, 1)).any()
    assert len(kept(tmp_path / "kernels")) == 2  # what they say may be heard


def test_two_servers_may_start_at_once(tmp_path, copying):
    with ThreadPoolExecutor(2) as pool:
        for kernels in pool.map(lambda _: load(tmp_path / "kernels"), range(2)):
            assert kernels.pack(torch.ones(1, 1)).any()
    assert (tmp_path / "ran").read_text() == "ran\n" * RUNS
    assert len(kept(tmp_path / "kernels")) == 1


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernels, match=r"no C\+\+ compiler was found; install g\+\+"):
        load(tmp_path)


def test_a_compiler_that_fails(tmp_path, monkeypatch):
    script = '[ "$1" = --version ] || { echo first >&2; echo "error: no such flag" >&2; exit 1; }'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(NoKernels, match="failed: error: no such flag"):
        load(tmp_path / "kernels")
    assert kept(tmp_path / "kernels") == []


def test_a_compiler_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(NoKernels, match="cannot be run"):
        load(tmp_path)


def test_a_compiler_that_is_no_command(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "-O3')
    with pytest.raises(NoKernels, match="CXX is not a command"):
        load(tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "kernels").write_text("")
    with pytest.raises(NoKernels, match="cannot be built in"):
        load(tmp_path / "kernels")


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "overwritten": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "one bit": lambda path: path.write_bytes(_flipped(path.read_bytes())),
}


def _flipped(content):
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_compiled_again(damage, tmp_path, copying):
    """Loading it would end the process, at every start."""
    folder = tmp_path / "kernels"
    whole = library(folder)  # compiled, but not loaded: damage would end this process too
    damage(whole)
    assert load(folder).pack(torch.ones(1, 1)).any()
    assert kept(folder) == [whole]
    assert (tmp_path / "ran").read_text() == "ran\n" * 2 * RUNS


def test_what_is_left_over_is_swept_away(tmp_path, copying):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "compiling-1234").mkdir()
    (folder / "compiling-1234" / "float32.o").write_text("half of it")
    old, recent, other = folder / "cpu-old.so", folder / "cpu-recent.so", folder / "notes.txt"
    for path in (old, recent, other):
        path.write_text("")
    os.utime(old, (0, time.time() - UNUSED_S - 60))
    load(folder)
    assert other.exists()
    left = kept(folder)
    assert recent in left and len(left) == 2
    assert not (folder / "compiling-1234").exists()


def test_a_library_in_use_counts_as_used(tmp_path, copying):
    folder = tmp_path / "kernels"
    load(folder)
    (used,) = kept(folder)
    os.utime(used, (0, 0))
    load(folder)
    assert time.time() - used.stat().st_mtime < 60


def test_a_compiler_that_is_killed(tmp_path, copying, monkeypatch):
    """It says so, and the next start compiles."""
    folder = tmp_path / "kernels"
    good = os.environ["CXX"]
    (tmp_path / "bad").mkdir()
    script = '[ "$1" = --version ] || kill -9 $$'
    monkeypatch.setenv("CXX", compiler(tmp_path / "bad", script))
    with pytest.raises(NoKernels, match=r"was ended by SIGKILL; is there enough memory\?"):
        load(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    monkeypatch.setenv("CXX", good)
    assert load(folder).pack(torch.ones(1, 1)).any()


def test_a_full_disk(tmp_path, monkeypatch):
    script = (
        '[ "$1" = --version ] && exit\n'
        'echo "fatal error: error writing to /a/b.s: No space left on device" >&2\n'
        'echo "compilation terminated." >&2; exit 1'
    )
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(NoKernels, match="kernels: no space is left there; free some"):
        load(tmp_path / "kernels")


def test_a_compilers_own_files_are_swept_too(tmp_path, monkeypatch):
    script = '[ "$1" = --version ] && exit\necho "error: $TMPDIR" >&2; exit 1'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(NoKernels, match="kernels/compiling-"):
        load(tmp_path / "kernels")


def test_loading_leaves_small_numbers_alone(kernels):
    """A library linked with -ffast-math makes the whole process flush them to zero."""
    assert float.fromhex("0x1p-1074") * 1.0 > 0
