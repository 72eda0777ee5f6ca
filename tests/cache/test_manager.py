import pytest

from ropewalk.cache.manager import BlockCounts, CacheManager
from ropewalk.cache.types import InvariantError
from tests.cache.bookkeeping import store

LONG = list(range(100, 120))


def blocks(cache: CacheManager, seq: str) -> list[int]:
    return list(cache.table(seq).blocks)


def table(cache, seq):
    blocks, bases = cache.table(seq)
    return list(blocks), list(bases)


def test_a_table_grows_block_by_block():
    cache = CacheManager(6, 4)
    assert cache.reserve("a", LONG[:5], 5) == 0
    assert table(cache, "a") == ([1, 2], [0, 4])
    cache.commit("a", LONG[:5], 5)
    assert cache.reserve("a", LONG[:8], 8) == 5
    assert blocks(cache, "a") == [1, 2]
    assert cache.reserve("a", LONG[:9], 9) == 5
    assert table(cache, "a") == ([1, 2, 3], [0, 4, 8])
    assert cache.counts() == BlockCounts(free=2, active=3, cached=0)
    cache.check()


def test_room_can_be_reserved_for_a_part():
    cache = CacheManager(6, 4)
    assert cache.reserve("a", LONG[:12], 3) == 0
    assert blocks(cache, "a") == [1]
    assert cache.reserve("a", LONG[:12], 12) == 0
    assert blocks(cache, "a") == [1, 2, 3]


def test_release_frees_the_tail_first():
    cache = CacheManager(6, 2)
    store(cache, "a", LONG[:5])
    cache.release("a")
    assert cache.counts() == BlockCounts(free=3, active=0, cached=2)
    cache.reserve("b", [1] * 10, 10)
    # 4 and 5 were never used; then a's blocks from its end to its beginning.
    assert blocks(cache, "b") == [4, 5, 3, 2, 1]
    assert cache.evicted_blocks == 2
    cache.check()


def test_what_is_flushed_is_not_found_again():
    cache = CacheManager(9, 2)
    store(cache, "a", LONG[:5])
    store(cache, "b", [*LONG[:2], 1, 2, 3])  # its first block is a's
    cache.release("b")
    assert cache.counts() == BlockCounts(free=4, active=3, cached=1)
    assert cache.flush() == 1
    cache.check()
    assert cache.counts() == BlockCounts(free=5, active=3, cached=0)
    assert store(cache, "c", LONG[:5]) == 0
    assert blocks(cache, "a") == [1, 2, 3]  # still its own
    assert cache.flush() == 0  # all of it is held


def test_what_goes_on_from_flushed_blocks_is_not_found_either():
    cache = CacheManager(9, 2)
    store(cache, "a", LONG[:4])
    cache.flush()
    store(cache, "a", LONG[:8])
    cache.release("a")
    assert cache.counts().cached == 0
    assert store(cache, "b", LONG[:8]) == 0
    cache.release("b")
    assert store(cache, "c", LONG[:8]) == 6  # what came after the flush is


def test_eviction_shortens_a_prefix_from_its_end():
    cache = CacheManager(5, 2)
    store(cache, "a", LONG[:8])
    cache.release("a")
    cache.reserve("b", [1, 2], 2)
    assert blocks(cache, "b") == [4]
    assert cache.evicted_blocks == 1
    cache.release("b")
    assert cache.reserve("c", LONG[:8], 8) == 6
    assert blocks(cache, "c") == [1, 2, 3, 4]


def test_a_prefix_is_shared_while_held_and_after():
    cache = CacheManager(8, 4)
    store(cache, "a", LONG[:9])
    assert cache.reserve("b", [*LONG[:8], 1], 9) == 8
    assert blocks(cache, "b") == [1, 2, 4]
    assert cache.counts() == BlockCounts(free=3, active=4, cached=0)
    cache.release("a")
    assert cache.counts() == BlockCounts(free=4, active=3, cached=0)
    cache.release("b")
    assert cache.counts() == BlockCounts(free=5, active=0, cached=2)
    assert cache.reserve("c", [*LONG[:4], 1, 1], 6) == 4
    assert blocks(cache, "c") == [1, 5]
    assert cache.counts() == BlockCounts(free=4, active=2, cached=1)
    cache.check()


@pytest.mark.parametrize(("length", "found"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_leaves_at_least_one_token_and_its_own_block(length, found):
    cache = CacheManager(9, 4)
    store(cache, "a", LONG[:12])
    assert cache.reserve("b", LONG[:length], length) == found
    own = blocks(cache, "b")[found // 4 :]
    assert own and not set(own) & set(blocks(cache, "a"))
    cache.check()


def test_only_full_computed_blocks_are_shared():
    cache = CacheManager(9, 4)
    cache.reserve("a", LONG[:12], 12)
    cache.commit("a", LONG[:12], 7)
    assert cache.reserve("b", LONG[:12], 12) == 4
    cache.commit("a", LONG[:12], 8)
    assert cache.reserve("c", LONG[:12], 12) == 8
    cache.check()


def test_salt_and_switches_prevent_sharing():
    cache = CacheManager(20, 2)
    store(cache, "a", LONG[:5], salt="x")
    assert store(cache, "b", LONG[:5]) == 0
    assert store(cache, "c", LONG[:5], salt="y") == 0
    assert store(cache, "d", LONG[:5], salt="x") == 4
    assert store(cache, "e", LONG[:5], salt="x", share=False) == 0
    off = CacheManager(20, 2, prefix_sharing=False)
    store(off, "a", LONG[:5])
    assert store(off, "b", LONG[:5]) == 0
    off.release("a")
    assert off.counts().cached == 0


def test_equal_blocks_computed_twice_are_published_once():
    cache = CacheManager(12, 2)
    cache.reserve("a", LONG[:5], 5)
    cache.reserve("b", LONG[:7], 7)
    cache.commit("a", LONG[:5], 5)
    cache.commit("b", LONG[:7], 7)
    cache.check()
    # a's first two blocks stand for both; b's third continues them.
    assert cache.reserve("c", LONG[:7], 7) == 6
    assert blocks(cache, "c")[:3] == [1, 2, 6]
    for seq in "abc":
        cache.release(seq)
    assert cache.counts().cached == 3
    cache.check()


def test_nothing_is_published_after_a_lost_beginning():
    cache = CacheManager(6, 1)
    cache.reserve("a", [1], 1)
    cache.reserve("b", [1, 2, 3], 1)
    cache.commit("a", [1], 1)
    cache.commit("b", [1, 2, 3], 1)
    cache.release("a")
    cache.reserve("other", [9] * 4, 4)  # takes a's block, whose entry b would continue
    assert cache.evicted_blocks == 1
    cache.release("other")
    cache.reserve("b", [1, 2, 3], 3)
    cache.commit("b", [1, 2, 3], 3)
    cache.check()
    assert cache.reserve("c", [1, 2, 3], 3) is None
    cache.release("b")
    assert cache.reserve("c", [1, 2, 3], 3) == 0


def test_a_failed_reservation_changes_nothing():
    cache = CacheManager(6, 2)
    store(cache, "a", LONG[:4])
    store(cache, "b", LONG[10:13])
    cache.release("a")  # two cached and one untouched block are free
    before = (cache.counts(), blocks(cache, "b"), cache.evicted_blocks)
    order = list(cache._pool._free)
    assert cache.reserve("c", LONG[:12], 12) is None  # two hits, four more wanted
    assert cache.reserve("b", LONG[:20], 20) is None
    assert (cache.counts(), blocks(cache, "b"), cache.evicted_blocks) == before
    assert list(cache._pool._free) == order
    assert list(cache.sequences) == ["b"]
    with pytest.raises(KeyError):
        cache.table("c")
    cache.check()


def test_hits_that_are_free_count_as_room_they_take():
    cache = CacheManager(4, 2)
    store(cache, "a", LONG[:4])
    cache.release("a")
    # Three free blocks, two of them hits: one more is all there is.
    assert cache.reserve("b", LONG[:8], 8) is None
    assert cache.reserve("b", LONG[:6], 6) == 4
    assert blocks(cache, "b") == [1, 2, 3]


def test_hits_are_not_evicted_for_the_rest_of_their_own_reservation():
    cache = CacheManager(4, 2)
    store(cache, "a", LONG[:4])
    cache.release("a")
    cache.reserve("x", [7, 8], 2)  # the block that was never used
    cache.release("x")
    assert cache.reserve("b", LONG[:5], 5) == 4
    assert blocks(cache, "b") == [1, 2, 3]
    assert cache.evicted_blocks == 0


def test_forgetting_withdraws_what_was_published_or_shared():
    cache = CacheManager(12, 2)
    store(cache, "a", LONG[:4])
    store(cache, "b", LONG[:7])
    cache.release("a")
    cache.release("b", forget=True)
    cache.check()
    assert cache.counts() == BlockCounts(free=11, active=0, cached=0)
    assert cache.evicted_blocks == 0
    assert cache.reserve("c", LONG[:7], 7) == 0


def test_forgetting_reaches_free_blocks_that_continue_the_forgotten():
    cache = CacheManager(12, 2)
    store(cache, "a", LONG[:3])
    store(cache, "b", LONG[:9])
    cache.release("b")
    assert cache.counts().cached == 3
    cache.release("a", forget=True)
    assert cache.counts() == BlockCounts(free=11, active=0, cached=0)
    cache.check()


@pytest.mark.parametrize("use", ["table", "release"])
def test_unknown_sequences_raise(use):
    cache = CacheManager(4, 2)
    cache.reserve("a", [1], 1)
    cache.release("a")
    with pytest.raises(KeyError):
        getattr(cache, use)("a")


@pytest.mark.parametrize("upto", [-1, 0, 4])
def test_reservations_outside_the_tokens_are_refused(upto):
    with pytest.raises(ValueError, match="cannot reserve"):
        CacheManager(4, 2).reserve("a", [1, 2, 3], upto)


@pytest.mark.parametrize("computed", [1, 5, 7])
def test_commits_backwards_or_beyond_the_room_are_refused(computed):
    cache = CacheManager(6, 2)
    cache.reserve("a", LONG[:8], 4)
    cache.commit("a", LONG[:8], 2)
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit("a", LONG[:8], computed)


def test_a_block_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        CacheManager(4, 0)


def test_a_pool_sized_buffer_is_not_enough_for_shared_tables():
    # BP9: eight sequences of four blocks each in a pool of eleven.
    cache = CacheManager(12, 2)
    store(cache, "0", LONG[:7])
    for i in range(1, 8):
        assert store(cache, str(i), LONG[:7]) == 6
    assert sum(len(blocks(cache, str(i))) for i in range(8)) == 32
    assert cache.counts() == BlockCounts(free=0, active=11, cached=0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._sequences["a"].blocks.append(1),
        lambda cache: cache._sequences["a"].blocks.pop(),
        lambda cache: setattr(cache._sequences["a"], "computed", 99),
        lambda cache: setattr(cache._sequences["a"], "computed", 1),
        lambda cache: cache._pool.share([3]),
        lambda cache: cache._keeper.cached.add(5),
        lambda cache: cache._keeper.cached.clear(),
        lambda cache: cache._sequences.pop("a"),
    ],
)
def test_check_sees_damage(damage):
    cache = CacheManager(9, 2)
    store(cache, "a", LONG[:5])
    store(cache, "b", [1, 2, 3])
    cache.release("b")
    cache.check()
    damage(cache)
    with pytest.raises(InvariantError):
        cache.check()
