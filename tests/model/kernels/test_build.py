"""The library is built once, kept, and missed with a reason."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model.kernels.build import SOURCES, NoKernels, load

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
    assert len(list((tmp_path / "kernels").iterdir())) == 2  # what they say may be heard


def test_two_servers_may_start_at_once(tmp_path, copying):
    with ThreadPoolExecutor(2) as pool:
        for kernels in pool.map(lambda _: load(tmp_path / "kernels"), range(2)):
            assert kernels.pack(torch.ones(1, 1)).any()
    assert (tmp_path / "ran").read_text() == "ran\n" * 2 * RUNS
    assert len(list((tmp_path / "kernels").iterdir())) == 1


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
    assert list((tmp_path / "kernels").iterdir()) == []


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


def test_a_library_that_is_broken(tmp_path, copying):
    load(tmp_path / "good")
    (good,) = (tmp_path / "good").iterdir()
    broken = tmp_path / "broken" / good.name
    broken.parent.mkdir()
    broken.write_bytes(bytes(1000))
    with pytest.raises(NoKernels, match="cannot be loaded"):
        load(broken.parent)


def test_loading_leaves_small_numbers_alone(kernels):
    """A library linked with -ffast-math makes the whole process flush them to zero."""
    assert float.fromhex("0x1p-1074") * 1.0 > 0
