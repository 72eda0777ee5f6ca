"""Combinations of which a usual run tests some, and `scripts/test --full` all."""

from itertools import product

import pytest


def combined(*values, always):
    """Every combination of the values, for `parametrize`.

    always: whether a combination also runs without `--full`.
    """
    return [
        pytest.param(
            *each, id="-".join(map(str, each)), marks=() if always(*each) else pytest.mark.full
        )
        for each in product(*values)
    ]


def thirds(*values):
    """Every combination, of which a usual run tests a third.

    That third contains every pair of values from two lists if another list has three.
    """
    lists = [list(of) for of in values]
    return combined(
        *lists,
        always=lambda *each: (
            sum(of.index(value) for of, value in zip(lists, each, strict=True)) % 3 == 0
        ),
    )
