"""Overlapping stop strings: the first to complete wins, the longest of those that tie."""

import pytest

from ropewalk.model.tokenizers.stops import Found, StopFinder


@pytest.mark.parametrize(
    ("stops", "pieces", "found"),
    [
        (["abcd", "bc"], ["abcd"], Found("bc", 3)),
        (["ab", "b"], ["xab"], Found("ab", 3)),
        (["aab"], ["aa", "ab"], Found("aab", 2)),
        (["ababc"], ["ababababc"], Found("ababc", 9)),
        (["\n\n"], ["\n", "x\n", "\n"], Found("\n\n", 1)),
        (["xy"], ["x", "x", "z"], None),
    ],
)
def test_the_stop_that_completes_first(stops, pieces, found):
    finder = StopFinder(stops)
    results = [finder.feed(piece) for piece in pieces]
    assert results[-1] == found
    assert results[:-1] == [None] * (len(pieces) - 1)


def test_pending_is_the_longest_tail_that_may_become_a_stop():
    finder = StopFinder(["aaab", "aac"])
    pending = []
    for character in "aaaad":
        assert finder.feed(character) is None
        pending.append(finder.pending)
    assert pending == [1, 2, 3, 3, 0]


def test_work_per_character_does_not_grow_with_the_text_held_back():
    class Counting(str):
        compared = 0

        def __getitem__(self, index):
            Counting.compared += 1
            return super().__getitem__(index)

    finder = StopFinder(["a" * 500 + "b"])
    finder._stops = [(Counting(stop), borders) for stop, borders in finder._stops]
    for _ in range(2000):
        assert finder.feed("a") is None
    assert Counting.compared <= 3 * 2000
