import gc
import mmap
import platform
from pathlib import Path

import pytest
import torch

from ropewalk.cache import huge_pages
from ropewalk.cache.huge_pages import HugePages

PAGE = 2 << 20


def test_tensors_lie_side_by_side_from_the_start_of_a_page():
    pages = HugePages()
    first = pages.empty(3, 5, dtype=torch.float32)
    second = pages.empty(7, dtype=torch.bfloat16)
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 64
    assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 5), torch.float32, True)
    assert (second.shape, second.dtype) == ((7,), torch.bfloat16)


def test_none_overlap():
    pages = HugePages()
    sizes = [1, 63, 64, 65, 1000, PAGE + 1]
    made = [pages.empty(size, dtype=torch.int8).fill_(i) for i, size in enumerate(sizes)]
    assert all((each == i).all() for i, each in enumerate(made))


def test_one_that_is_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(huge_pages, "_CHUNK", PAGE)
    pages = HugePages()
    small, large = pages.empty(64, dtype=torch.int8), pages.empty(3 * PAGE, dtype=torch.int8)
    assert large.data_ptr() % PAGE == 0
    small.fill_(1)
    large.fill_(2)
    assert (small.sum(), large[-1]) == (64, 2)


def test_of_no_numbers(monkeypatch):
    monkeypatch.setattr(huge_pages, "_CHUNK", 64)
    pages = HugePages()
    assert pages.empty(0, 4, dtype=torch.float32).shape == (0, 4)
    pages.empty(64 + 1, dtype=torch.int8)
    assert pages.empty(0, 4, dtype=torch.float32).shape == (0, 4)


@pytest.mark.skipif(platform.system() != "Linux", reason="counted in /proc")
def test_what_nobody_has_any_more_is_given_back(monkeypatch):
    def mapped():
        pages, *_ = Path("/proc/self/statm").read_text().split()
        return int(pages) * mmap.PAGESIZE

    chunk = 512 << 20
    monkeypatch.setattr(huge_pages, "_CHUNK", chunk)
    before = mapped()
    kept = HugePages().empty(64, dtype=torch.int8)
    assert mapped() - before >= chunk
    del kept
    gc.collect()
    assert mapped() - before < chunk


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="nobody to ask")
def test_a_system_without_huge_pages(monkeypatch):
    asked = []

    class Refusing(mmap.mmap):
        def madvise(self, advice):
            asked.append(advice)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert HugePages().empty(100, dtype=torch.float32).fill_(1).sum() == 100
    assert asked == [mmap.MADV_HUGEPAGE]


def test_a_system_that_never_heard_of_them(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert HugePages().empty(100, dtype=torch.float32).fill_(1).sum() == 100
