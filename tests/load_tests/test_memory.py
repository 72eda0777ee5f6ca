import os

import pytest

from ropewalk.load_tests.common import memory
from ropewalk.load_tests.common.memory import free_memory


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """With 40,000 kB left, and no container."""
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    memory.MACHINE.write_text("MemFree: 1000 kB\nMemAvailable: 40000 kB\n")


def test_pages_that_are_given_up_are_free():
    assert free_memory() == 40_000 << 10


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    assert free_memory() == 4000
    (tmp_path / "memory.stat").write_text("active_file 7\ninactive_file 1500\n")
    assert free_memory() == 5500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == 40_000 << 10


def test_a_system_that_says_little(monkeypatch):
    memory.MACHINE.unlink()
    sizes = {"SC_AVPHYS_PAGES": 4000, "SC_PAGE_SIZE": 10}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert free_memory() == 40_000
