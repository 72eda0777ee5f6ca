"""Combinations of which a usual run tests some, and `scripts/test --full` all."""

from itertools import combinations, product

import pytest


def combined(*values, always, possible=lambda *each: True):
    """Every possible combination of the values, for `parametrize`.

    always: whether a combination also runs without `--full`.
    """
    return [
        pytest.param(
            *each, id="-".join(map(str, each)), marks=() if always(*each) else pytest.mark.full
        )
        for each in product(*values)
        if possible(*each)
    ]


def pairs(possible=lambda *each: True, **axes):
    """Every possible combination of the axes' values, as a decorator that parametrizes a test.

    A usual run tests so many that any two values of different axes meet in one of them.
    """
    lists = [list(of) for of in axes.values()]
    every = [
        each
        for each in product(*(range(len(of)) for of in lists))
        if possible(*(of[index] for of, index in zip(lists, each, strict=True)))
    ]
    # Neighbours share most values, so that they are looked at in an order that jumps.
    every.sort(key=lambda each: (sum(each) % max(map(len, lists)), each))
    met, usual = set(), set()
    most = len(lists) * (len(lists) - 1) // 2
    for new in range(most, 0, -1):  # first those in which the most values meet for the first time
        for each in every:
            meeting = set(combinations(enumerate(each), 2)) - met
            if len(meeting) >= new:
                met |= meeting
                usual.add(each)
    given = []
    for each in sorted(every):
        values = [of[index] for of, index in zip(lists, each, strict=True)]
        given.append(pytest.param(*values, marks=() if each in usual else pytest.mark.full))
    return pytest.mark.parametrize(list(axes), given)
