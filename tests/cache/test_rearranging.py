"""Fork, truncate, evict and move, as far as they are integers: which block is whose, and where."""

import pytest

from ropewalk.cache.manager import BlockCounts, CacheManager
from ropewalk.cache.rearranging import Copy
from ropewalk.cache.types import EventKind
from tests.cache.test_manager import LONG, blocks, store, table


def kinds(cache: CacheManager) -> list[tuple[EventKind, int]]:
    return [(event.kind, event.block) for event in cache.drain_events()]


def test_a_fork_shares_full_blocks_and_copies_the_rest():
    cache = CacheManager(8, 4)
    store(cache, "a", LONG[:10])
    cache.drain_events()
    assert cache.rearranger.fork("a", "b", 10) == [Copy(3, 4)]
    assert table(cache, "b") == ([1, 2, 4], [0, 4, 8])
    assert kinds(cache) == [(EventKind.REUSED, 1), (EventKind.REUSED, 2), (EventKind.TAKEN, 4)]
    cache.check()
    # Both go on, and what each fills is published after the same beginning.
    store(cache, "a", LONG[:12])
    store(cache, "b", [*LONG[:10], 1, 2])
    assert store(cache, "c", [*LONG[:10], 1, 2, 3]) == 12


def test_a_fork_at_a_block_needs_no_copy_and_no_room():
    cache = CacheManager(4, 4)
    store(cache, "a", LONG[:10])
    assert cache.rearranger.fork("a", "b", 8) == []
    assert cache.rearranger.fork("a", "c", 9) is None
    assert "c" not in cache.sequences
    cache.check()


def test_a_fork_may_begin_before_what_its_parent_published():
    cache = CacheManager(8, 4)
    store(cache, "a", LONG[:12])
    assert cache.rearranger.fork("a", "b", 6) == [Copy(2, 4)]
    store(cache, "b", [*LONG[:6], 1, 2])
    assert store(cache, "c", [*LONG[:6], 1, 2, 3]) == 8


@pytest.mark.parametrize("length", [0, 11])
def test_a_fork_begins_with_computed_tokens(length):
    cache = CacheManager(8, 4)
    store(cache, "a", LONG[:10])
    with pytest.raises(ValueError, match="cannot fork"):
        cache.rearranger.fork("a", "b", length)


def test_truncating_gives_blocks_back_and_withdraws_the_one_to_be_written_again():
    cache = CacheManager(8, 4)
    store(cache, "a", LONG[:12])
    assert cache.rearranger.truncate("a", 6) == []
    assert blocks(cache, "a") == [1, 2]
    assert cache.computed("a") == 6
    cache.check()
    # Blocks 2 and 3 stand for nothing any more; block 1 still does.
    assert store(cache, "b", LONG[:12]) == 4
    store(cache, "a", [*LONG[:6], 1, 2, 3])
    assert store(cache, "c", [*LONG[:6], 1, 2, 3]) == 8


def test_truncating_without_room_changes_nothing():
    cache = CacheManager(4, 4)
    store(cache, "a", LONG[:9])
    cache.rearranger.fork("a", "b", 8)
    before = cache.table("b").blocks[:]
    assert cache.rearranger.truncate("b", 7) is None
    assert (cache.table("b").blocks, cache.computed("b")) == (before, 8)
    cache.check()


def test_truncating_makes_room_for_its_own_copy():
    cache = CacheManager(5, 4)
    store(cache, "a", LONG[:16])
    cache.rearranger.fork("a", "b", 8)
    assert cache.rearranger.truncate("a", 7) == [Copy(2, 4)]
    cache.check()


@pytest.mark.parametrize(
    ("renumber", "bases"), [(False, [0, 12, 16, 20]), (True, [0, 4, 8, 12])], ids=["keep", "close"]
)
def test_evicting_drops_a_span(renumber, bases):
    cache = CacheManager(10, 4)
    store(cache, "a", LONG[:18])
    assert cache.rearranger.evict("a", 1, 2, renumber=renumber, rewrite=False) == []
    cache.reserve("a", LONG, 13)
    assert table(cache, "a") == ([1, 4, 5, 6], bases)
    assert cache.computed("a") == 10
    assert cache.counts() == BlockCounts(free=3, active=4, cached=2)
    cache.check()


def test_nothing_is_published_after_an_eviction():
    cache = CacheManager(12, 4)
    store(cache, "a", LONG[:12])
    cache.rearranger.evict("a", 1, 1, renumber=True, rewrite=False)
    kept = LONG[:4] + LONG[8:]
    store(cache, "a", kept)
    cache.release("a")
    assert store(cache, "b", kept) == 4  # the first block alone
    assert store(cache, "c", LONG[:13]) == 12  # what was published before is still good


def test_rewritten_blocks_are_withdrawn_and_shared_ones_copied():
    cache = CacheManager(10, 4)
    store(cache, "a", LONG[:16])
    cache.rearranger.fork("a", "b", 12)
    assert cache.rearranger.evict("a", 1, 1, renumber=True, rewrite=True) == [Copy(3, 5)]
    assert blocks(cache, "a") == [1, 5, 4]
    assert blocks(cache, "b") == [1, 2, 3]
    cache.check()
    assert store(cache, "c", LONG[:17]) == 12


def test_an_eviction_without_room_for_its_copies_changes_nothing():
    cache = CacheManager(5, 4)
    store(cache, "a", LONG[:16])
    cache.rearranger.fork("a", "b", 16)
    cache.drain_events()
    assert cache.rearranger.evict("a", 1, 1, renumber=True, rewrite=True) is None
    assert table(cache, "a") == ([1, 2, 3, 4], [0, 4, 8, 12])
    assert kinds(cache) == []
    cache.check()


@pytest.mark.parametrize(("first", "count"), [(0, 0), (-1, 1), (2, 2), (4, 1)])
def test_only_full_blocks_are_evicted(first, count):
    cache = CacheManager(10, 4)
    store(cache, "a", LONG[:15])
    with pytest.raises(ValueError, match="not all full"):
        cache.rearranger.evict("a", first, count, renumber=True, rewrite=False)


def test_a_span_goes_on_only_after_a_full_block():
    cache = CacheManager(10, 4)
    store(cache, "a", LONG[:12])
    store(cache, "b", [1, 2, 3])
    with pytest.raises(ValueError, match="full block"):
        cache.rearranger.move("a", 0, 1, "b", rewrite=False)
