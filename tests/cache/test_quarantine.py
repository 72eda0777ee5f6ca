"""Blocks that leave the pool for good, and what the manager tells of every block it moves."""

import pytest

from ropewalk.cache.block_pool import BlockPool
from ropewalk.cache.manager import BlockCounts, CacheManager
from ropewalk.cache.types import InvariantError
from tests.cache.bookkeeping import store
from tests.cache.events import filled, released, reused, taken

TOKENS = list(range(100, 120))


# ------------------------------------------------------------------------------ events


def test_events_in_the_order_of_happening():
    cache = CacheManager(6, 4)
    cache.reserve("a", TOKENS[:9], 9)
    assert cache.drain_events() == [taken(1, "a"), taken(2, "a"), taken(3, "a")]
    cache.commit("a", TOKENS[:9], 3)
    assert cache.drain_events() == []
    cache.commit("a", TOKENS[:9], 9)
    assert cache.drain_events() == [filled(1, "a"), filled(2, "a")]
    cache.reserve("b", [*TOKENS[:4], 1, 2], 6)
    assert cache.drain_events() == [reused(1, "b"), taken(4, "b")]
    cache.release("a")
    cache.release("b")
    first = [released(1, "a", 0), released(2, "a", 4), released(3, "a", 8)]
    assert cache.drain_events() == [*first, released(1, "b", 0), released(4, "b", 4)]
    assert cache.drain_events() == []


def test_a_free_block_that_is_found_again_is_reused_and_not_taken():
    cache = CacheManager(6, 2)
    store(cache, "a", TOKENS[:5])
    cache.release("a")
    cache.drain_events()
    cache.reserve("b", TOKENS[:5], 5)
    assert cache.drain_events() == [reused(1, "b"), reused(2, "b"), taken(4, "b")]


def test_blocks_that_are_not_published_are_filled_all_the_same():
    cache = CacheManager(6, 2, prefix_sharing=False)
    store(cache, "a", TOKENS[:5])
    assert cache.drain_events()[3:] == [filled(1, "a"), filled(2, "a")]


def test_a_failed_reservation_tells_nothing():
    cache = CacheManager(4, 2)
    store(cache, "a", TOKENS[:4])
    cache.drain_events()
    assert cache.reserve("b", TOKENS[:9], 9) is None
    assert cache.drain_events() == []


def test_a_block_that_is_to_be_written_again_counts_as_taken():
    cache = CacheManager(9, 2)
    store(cache, "a", TOKENS[:8])
    cache.drain_events()
    cache.rearranger.truncate("a", 3)
    given_up = [released(3, "a", 4), released(4, "a", 6)]
    assert cache.drain_events() == [*given_up, taken(2, "a")]
    store(cache, "a", TOKENS[:8])
    cache.rearranger.fork("a", "b", 8)
    cache.drain_events()
    cache.rearranger.truncate("a", 3)  # the block is b's as well, so a has a copy
    events = cache.drain_events()
    assert events[2:] == [taken(cache.table("a").blocks[1], "a"), released(2, "a", 2)]


# -------------------------------------------------------------------------- quarantine


def test_a_free_block_leaves_at_once():
    cache = CacheManager(4, 2)
    assert cache.capacity == 6
    cache.quarantine(2)
    cache.check()
    assert cache.capacity == 4
    assert cache.counts() == BlockCounts(free=2, active=0, cached=0, quarantined=1)
    assert cache.reserve("a", TOKENS[:5], 5) is None
    cache.reserve("a", TOKENS[:4], 4)
    assert list(cache.table("a").blocks) == [1, 3]


def test_a_held_block_leaves_with_its_last_holder():
    cache = CacheManager(6, 2)
    store(cache, "a", TOKENS[:5])
    store(cache, "b", TOKENS[:5])
    assert cache.holders(1) == ["a", "b"]
    assert cache.holders(3) == ["a"]
    assert cache.holders(5) == []
    cache.quarantine(1)
    cache.check()
    assert cache.capacity == 8
    assert cache.counts() == BlockCounts(free=1, active=4, cached=0, quarantined=0)
    cache.release("a")
    cache.check()
    assert cache.counts().quarantined == 0
    cache.release("b")
    cache.check()
    assert cache.counts() == BlockCounts(free=4, active=0, cached=0, quarantined=1)
    cache.reserve("c", TOKENS[:8], 8)
    assert 1 not in cache.table("c").blocks


def test_what_continues_a_quarantined_block_is_found_no_more():
    cache = CacheManager(9, 2)
    store(cache, "a", TOKENS[:7])
    cache.release("a")
    assert cache.counts().cached == 3
    cache.quarantine(2)
    cache.check()
    assert cache.counts() == BlockCounts(free=6, active=0, cached=1, quarantined=1)
    assert cache.reserve("b", TOKENS[:7], 7) == 2


def test_nothing_is_published_after_a_quarantined_block():
    cache = CacheManager(9, 2)
    cache.reserve("a", TOKENS[:7], 7)
    cache.commit("a", TOKENS[:7], 3)
    cache.quarantine(2)  # the one being written
    cache.commit("a", TOKENS[:7], 7)
    cache.check()
    cache.release("a")
    assert cache.counts().cached == 1
    assert cache.reserve("b", TOKENS[:7], 7) == 2


def test_quarantining_twice_is_once():
    cache = CacheManager(4, 2)
    cache.quarantine(1)
    cache.quarantine(1)
    cache.check()
    assert cache.counts().quarantined == 1
    assert cache.capacity == 4


def test_a_retired_block_is_never_shared():
    pool = BlockPool(4)
    pool.retire(2)
    with pytest.raises(InvariantError, match="retired"):
        pool.share([2])
    with pytest.raises(InvariantError, match="not one of"):
        pool.retire(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._pool._free.update({1: None}),
        lambda cache: cache._pool._retired.clear(),
        lambda cache: cache._pool._retired.add(4),  # published
        lambda cache: cache._pool._retired.add(6),  # still in the free list
    ],
)
def test_check_sees_damage(damage):
    cache = CacheManager(7, 2)
    store(cache, "a", TOKENS[:5])
    cache.quarantine(1)
    store(cache, "b", TOKENS[5:8])
    cache.release("a")
    cache.check()
    damage(cache)
    with pytest.raises(InvariantError):
        cache.check()
