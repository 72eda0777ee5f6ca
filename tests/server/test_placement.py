"""Where a model computes, in which numbers, and how many blocks its cache gets."""

import os
import platform
from pathlib import Path

import pytest
import torch

from ropewalk.cache.kv import KVCache, bytes_per_token
from ropewalk.server import hardware
from ropewalk.server.errors import CommandError
from tests.cache.shape import Shape
from tests.model.tiny import CONFIG, on_triton, tiny

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GIB = 1 << 30
SPILLED = 2 * 3 * 4 * 2 * 5 * 4  # bytes of a block: layers, tokens, key heads, head_dim, float32
TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # keys and values, layers, key heads, head_dim, float32


def blocks(**changes):
    chosen = {"budget": None, "free_memory": GIB, "block_size": 16, "max_seqs": 4, "context": 256}
    return hardware.num_blocks(bytes_per_token(CONFIG, torch.float32), **chosen | changes)


@pytest.mark.parametrize(
    ("there", "wanted", "picked"),
    [
        (False, None, "cpu"),
        (True, None, "cuda"),
        (True, "cpu", "cpu"),
        (True, "cuda", "cuda"),
        (False, "cpu", "cpu"),
    ],
)
def test_cuda_is_used_where_there_is_one(monkeypatch, there, wanted, picked):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert hardware.pick_device(wanted).type == picked


def test_cuda_asked_for_in_vain(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="use --device cpu"):
        hardware.pick_device("cuda")


@pytest.mark.parametrize(("has", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_where_the_hardware_multiplies_it(monkeypatch, has, dtype):
    monkeypatch.setattr(hardware, "has_bf16_arithmetic", lambda: has)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: has or including_emulation
    )
    assert hardware.pick_dtype(None, CPU) == hardware.pick_dtype(None, CUDA) == dtype
    assert hardware.pick_dtype("float32", CPU) == torch.float32
    assert hardware.pick_dtype("float16", CUDA) == torch.float16


@pytest.mark.parametrize(("threads", "name"), [(1, "cpu, 1 thread"), (3, "cpu, 3 threads")])
def test_the_device_has_a_name_for_people(monkeypatch, threads, name):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert hardware.device_name(CPU) == name


def test_without_a_budget_blocks_stop_at_what_all_sequences_need():
    assert blocks() == 4 * 16 + 1
    assert blocks(context=257) == 4 * 17 + 1
    assert blocks(free_memory=10 * 16 * TOKEN_BYTES) == 10


def test_a_budget_is_used_to_the_last_whole_block():
    assert blocks(budget=GIB) == GIB // (16 * TOKEN_BYTES) > 4 * 16 + 1
    assert blocks(budget=10 * 16 * TOKEN_BYTES - 1, free_memory=0) == 9


def test_two_blocks_are_the_least():
    assert blocks(budget=2 * 16 * TOKEN_BYTES) == 2
    with pytest.raises(CommandError, match="raise --kv-memory or lower --block-size"):
        blocks(budget=2 * 16 * TOKEN_BYTES - 1)


@pytest.mark.parametrize(
    ("budget", "free", "slots"),
    [
        (None, 1 << 40, 20),  # as many blocks as the cache has
        (None, 8 * 2 * 5 * SPILLED, 5),  # an eighth of what is free, for each of two models
        (None, 0, 0),
        (0, 1 << 40, 0),
        (2 * 33 * SPILLED, 0, 33),
        (2 * 33 * SPILLED - 1, 0, 32),
    ],
)
def test_blocks_of_the_second_place(monkeypatch, budget, free, slots):
    kv = KVCache(Shape(3, 2, 5), blocks=21, block_size=4, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(hardware, "free_host_memory", lambda: free)
    assert hardware.num_slots(budget, kv, sharers=2) == slots


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 4_096_000),
        ({"memory.max": "max", "memory.current": "5000"}, 4_096_000),
        ({"memory.max": "1000000", "memory.current": "5000"}, 995_000),
        ({"memory.max": "9000000", "memory.current": "5000"}, 4_096_000),
        ({"memory.max": "1000", "memory.current": "5000"}, 0),
        ({"memory/memory.limit_in_bytes": "80", "memory/memory.usage_in_bytes": "30"}, 50),
        # Files that were read can be read again.
        ({"meminfo": "MemFree: 1 kB\nMemAvailable: 3000 kB\n"}, 3_072_000),
        ({"memory.max": "80", "memory.current": "70",
          "memory.stat": "anon 50\ninactive_file 20"}, 30),
        ({"memory/memory.limit_in_bytes": "80", "memory/memory.usage_in_bytes": "70",
          "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 20"}, 30),
    ],
)  # fmt: skip
def test_no_more_than_the_container_may_use(monkeypatch, tmp_path, files, free):
    sizes = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(hardware.os, "sysconf", sizes.get)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "MACHINE_MEMORY", tmp_path / "meminfo")
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert hardware.free_memory(CPU) == free // 4


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_no_more_threads_than_the_container_has_cores(monkeypatch, tmp_path, files, threads):
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert hardware.pick_threads(None) == threads
    assert hardware.pick_threads(16) == 16


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for there in (False, True):
        if there:
            (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(hardware, "NVIDIA", tmp_path / "nvidiactl")
        assert hardware.pick_device(None) == hardware.pick_device("cpu") == CPU
        assert ("that this build of torch (for CUDA 13.0) cannot use" in caplog.text) is there
    caplog.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert hardware.pick_device(None) == CPU and not caplog.text


def test_the_cache_takes_a_share_of_the_free_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "MACHINE_MEMORY", tmp_path / "none")
    monkeypatch.setattr(hardware.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
    assert hardware.free_memory(CPU) == 1000 * 4096 // 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 200_000))
    assert hardware.free_memory(CUDA) == 85_000


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_system():
    pieces = [b"x" * 20_000 for _ in range(3_000)]  # 60 MB, too small to be mapped one by one
    pieces = pieces[::100]  # what lies between is free, and stays with the library
    before = resident()
    hardware.return_freed_memory()
    assert before - resident() > 40_000_000
    assert len(pieces) == 30


@pytest.mark.parametrize("used", [True, False])
def test_a_gpu_gets_freed_memory_back_if_it_is_in_use(monkeypatch, used):
    """Weights from before they were rounded, say: what torch keeps is not free for a cache."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    hardware.return_freed_memory()
    assert len(emptied) == used


@pytest.mark.parametrize(
    ("wanted", "max_seqs", "encoding", "tokens"),
    [
        (None, 64, "t5", 2048),
        (None, 64, "t5-materialised", 512),
        (None, 64, "fire", 512),
        (None, 3000, "rope", 3000),
        (99, 64, "rope", 99),
    ],
)
def test_a_gpu_computes_more_tokens_in_a_step(wanted, max_seqs, encoding, tokens):
    """Unless memory grows with them and with all that is before them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    on_gpu = on_triton(tiny(encoding))
    assert hardware.num_step_tokens(wanted, max_seqs, on_gpu) == tokens
    assert hardware.num_step_tokens(wanted, max_seqs, tiny(encoding)) == min(
        tokens, max(max_seqs, 512)
    )
