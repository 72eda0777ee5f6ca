"""Combinations of which a usual run shows some, and `scripts/test --full` all."""

from itertools import product

import pytest


def combined(*values, always):
    """Every combination of the values, for `parametrize`.

    always: of one combination → whether it is run without `--full` too.
    """
    return [
        pytest.param(
            *each, id="-".join(map(str, each)), marks=() if always(*each) else pytest.mark.full
        )
        for each in product(*values)
    ]
