"""Parked sequences come back to what they left; where blocks leave for, and when."""

import pytest

from ropewalk.cache.keeper import Moves, SpillCounts
from ropewalk.cache.manager import CacheManager
from tests.cache.bookkeeping import store


class Paper:
    """A place that keeps no content, only what it was asked to do."""

    def __init__(self, slots, at_once=100, spoilt=()):
        self.slots, self.at_once, self.spoilt = slots, at_once, spoilt
        self.moves = Moves()
        self.put_blocks, self.taken_slots = [], []

    def put(self, blocks, slots):
        self.put_blocks += blocks

    def take(self, slots, blocks):
        self.taken_slots += slots
        return [slot not in self.spoilt for slot in slots]


def cache_of(blocks, *, slots, **more):
    place = Paper(slots, **more)
    return CacheManager(blocks, 2, place=place), place


def counts(cache):
    """Free slots, those that somebody waits for, and the others."""
    told = cache.spilled()
    cache.check()
    return told.free, told.waiting, told.cached


def come_back(cache, seq, tokens, **more):
    """How many tokens it has, and in how many steps they came."""
    steps = 1
    cache.begin_step(alone=False)
    while not cache.fetch(seq, tokens, len(tokens), **more):
        cache.check()
        cache.begin_step(alone=False)
        steps += 1
    computed = cache.reserve(seq, tokens, len(tokens), **more)
    cache.check()
    return computed, steps


A, B = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]


def test_nothing_moves_while_nobody_takes_the_blocks():
    cache, place = cache_of(9, slots=9)
    store(cache, "a", A)
    held = list(cache.table("a").blocks)
    cache.park("a")
    assert (cache.parked, counts(cache)) == ({"a"}, (6, 3, 0))
    assert cache.counts().active == 0 and cache.counts().cached == 3
    assert cache.intact("a")
    assert come_back(cache, "a", [*A, 6]) == (5, 1)
    assert list(cache.table("a").blocks) == held
    assert (place.put_blocks, cache.parked, counts(cache)) == ([], set(), (9, 0, 0))


def test_the_last_partly_filled_block_is_kept_too():
    cache, place = cache_of(5, slots=9)
    store(cache, "a", A)
    held = list(cache.table("a").blocks)
    cache.park("a")
    cache.begin_step(alone=False)
    store(cache, "b", B)
    assert sorted(place.put_blocks) == sorted(held)
    cache.release("b")
    assert come_back(cache, "a", [*A, 6]) == (5, 1)
    assert len(place.taken_slots) == 3
    cache.commit("a", [*A, 6, 7], 6)  # goes on to fill it
    cache.check()


def test_a_step_brings_back_only_so_many_blocks():
    cache, place = cache_of(20, slots=20, at_once=2)
    tokens = list(range(17))
    store(cache, "a", tokens)
    cache.park("a")
    store(cache, "b", range(100, 138))
    assert len(place.put_blocks) == 9
    cache.release("b", forget=True)
    assert come_back(cache, "a", [*tokens, 17]) == (17, 5)


def test_one_block_a_step_is_enough_to_come_back():
    """Also past prefixes that are not saved, and never will be as the place is full."""
    cache, _ = cache_of(9, slots=3, at_once=1)
    store(cache, "a", A)
    cache.park("a")
    store(cache, "b", range(20, 36))
    cache.release("b")
    assert come_back(cache, "a", [*A, 6]) == (5, 3)


def test_alone_everything_comes_back_at_once():
    cache, _ = cache_of(20, slots=20, at_once=2)
    tokens = list(range(17))
    store(cache, "a", tokens)
    cache.park("a")
    store(cache, "b", range(100, 138))
    cache.release("b", forget=True)
    cache.begin_step(alone=True)
    assert cache.fetch("a", tokens, 17)


def test_too_small_a_place_keeps_the_beginning():
    cache, _ = cache_of(5, slots=2)
    store(cache, "a", B)
    cache.park("a")
    store(cache, "b", range(20, 28))
    assert not cache.intact("a")
    cache.release("b")
    assert come_back(cache, "a", [*B, 13]) == (4, 1)
    cache.commit("a", [*B, 13], 8)
    cache.check()


def test_what_has_changed_is_computed_again_and_its_slot_never_used():
    cache, place = cache_of(5, slots=4, spoilt=[2])
    store(cache, "a", B)
    cache.park("a")
    store(cache, "b", range(20, 28))
    cache.release("b", forget=True)
    assert come_back(cache, "a", [*B, 13])[0] == 2
    assert sum(counts(cache)) == place.slots - 1


def test_a_prefix_that_made_room_is_found_again():
    cache, place = cache_of(5, slots=4)
    store(cache, "a", B)
    cache.release("a")
    cache.begin_step(alone=False)
    store(cache, "b", range(20, 28))
    assert len(place.put_blocks) == 3 and cache.evicted_blocks == 0
    assert counts(cache) == (1, 0, 3)
    cache.release("b")
    assert come_back(cache, "c", B) == (6, 1)
    assert cache.reserve("d", B[:4], 4, salt="other") is None  # its own room is all that counts


def test_prefixes_give_way_to_those_who_wait_and_the_oldest_first():
    cache, _ = cache_of(5, slots=3)
    for name, tokens in (("a", B), ("b", range(20, 27))):
        store(cache, name, tokens)
        cache.release(name)
        cache.begin_step(alone=False)
    store(cache, "c", range(30, 35))
    assert counts(cache) == (0, 0, 3)
    cache.park("c")
    assert counts(cache)[1:] == (3, 0)
    store(cache, "d", range(40, 48))
    cache.release("d", forget=True)
    assert come_back(cache, "e", B)[0] == 0
    cache.release("e")
    assert come_back(cache, "c", [*range(30, 35), 1]) == (5, 1)


def test_a_prefix_is_given_up_where_moving_it_would_take_long():
    cache, place = cache_of(5, slots=9, at_once=1)
    store(cache, "a", B)
    cache.release("a")
    cache.begin_step(alone=False)
    store(cache, "b", range(20, 28))
    assert len(place.put_blocks) == 1
    assert cache.evicted_blocks == 3  # nobody reaches the one that was moved either
    assert counts(cache) == (9, 0, 0)


def test_what_will_be_overwritten_next_is_saved_ahead():
    cache, place = cache_of(5, slots=9, at_once=2)
    store(cache, "a", B)
    last = cache.table("a").blocks[2]
    cache.release("a")
    cache.begin_step(alone=False)
    cache.save_ahead()
    assert len(place.put_blocks) == 2 and place.put_blocks[0] == last
    cache.begin_step(alone=False)
    cache.save_ahead()
    assert len(place.put_blocks) == 3
    store(cache, "b", range(20, 28))
    assert len(place.put_blocks) == 3 and cache.evicted_blocks == 0


def test_nothing_is_saved_ahead_while_blocks_abound():
    cache, place = cache_of(40, slots=9)
    store(cache, "a", B)
    cache.release("a")
    cache.begin_step(alone=False)
    cache.save_ahead()
    assert place.put_blocks == []


@pytest.mark.parametrize("forget", ["flush", "quarantine", "shift"])
def test_the_parked_keep_what_nobody_else_may_find(forget):
    """Blocks that they share with a running sequence, until these change."""
    cache, place = cache_of(20, slots=9)
    store(cache, "a", B)
    cache.reserve("b", B, len(B))
    cache.commit("b", B, len(B))
    shared = cache.table("b").blocks[0]
    cache.park("b")
    if forget == "flush":
        cache.flush()
    elif forget == "quarantine":
        cache.quarantine(shared)
    else:
        cache.rearranger.evict("a", 0, 1, renumber=True, rewrite=True)
        assert shared not in place.put_blocks and cache.table("a").blocks[0] in place.put_blocks
    cache.check()
    assert cache.intact("b") == (forget != "quarantine")
    assert come_back(cache, "b", [*B, 13])[0] == (0 if forget == "quarantine" else 7)
    assert cache.reserve("c", B, len(B)) == (6 if forget == "shift" else 0)


def test_an_aborted_sequence_leaves_nothing_of_its_own():
    cache, _ = cache_of(5, slots=4)
    store(cache, "a", A)
    cache.park("a")
    store(cache, "b", range(20, 28))
    cache.forget("a")
    cache.forget("nobody")
    assert counts(cache) == (2, 0, 2)  # two blocks were published, and may be found again
    cache.flush()
    assert counts(cache) == (4, 0, 0)


def test_without_a_place_parking_is_releasing():
    cache = CacheManager(5, 2)
    store(cache, "a", A)
    cache.park("a")
    assert not cache.parked
    assert cache.fetch("a", A, 5)
    assert cache.reserve("a", A, 5) == 4
    assert cache.spilled() == SpillCounts()


def test_own_computations_are_not_taken_from_others():
    cache = CacheManager(12, 2)
    store(cache, "a", B)
    assert cache.reserve("b", B, len(B), own=5) == 4
    assert cache.reserve("c", B, len(B), own=100) == 6
