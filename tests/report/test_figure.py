import math
from itertools import pairwise

import pytest

from ropewalk.report.figure import ARMS, THEME, looks, spread


def luminance(color: str) -> float:
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_is_seen_on_its_page(dark):
    colors = {name: pair[dark] for name, pair in THEME.items()}
    page = colors.pop("page")
    del colors["line"]  # of the grid, which stays behind
    assert all(contrast(color, page) >= 3 for color in colors.values())


def test_a_colour_has_one_name():
    assert len({light for light, _ in THEME.values()}) == len(THEME)


def test_no_two_arms_look_alike_and_the_zero_is_in_ink():
    arms = [f"arm {i}" for i in range(14)]
    found = looks(arms, "arm 3")
    assert found["arm 3"].color == ARMS[0]
    assert [arm for arm in arms if found[arm].color == ARMS[0]] == ["arm 3"]
    assert len(set(found.values())) == 14
    assert len({look.marker for look in list(found.values())[:8]}) == 8
    assert len({look.dash for look in list(found.values())[:5]}) > 3


def test_without_a_zero_no_arm_is_in_ink():
    assert looks(["rope"], None)["rope"].color != ARMS[0]


def test_labels_that_would_touch_move_apart_around_their_middle():
    found = spread([100, 100, 101, 200], 15, 0, 300)
    assert found[3] == 200
    assert [after - before for before, after in pairwise(found[:3])] == [15, 15]
    assert math.isclose(sum(found[:3]) / 3, 301 / 3)


def test_labels_stay_within_and_in_order():
    found = spread([1, 2, 290, 298, 300], 15, 0, 300)
    assert min(found) >= 0
    assert max(found) <= 300
    assert all(after - before >= 15 for before, after in pairwise(found))
