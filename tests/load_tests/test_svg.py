import math
from itertools import pairwise

import pytest

from ropewalk.load_tests.report.svg import (
    DARK,
    LIGHT,
    LINE,
    Scale,
    apart,
    bent_ticks,
    decades,
    looks,
    nice,
    text,
    told,
)


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


@pytest.mark.parametrize(("palette", "page"), [(LIGHT, "#ffffff"), (DARK, "#14161a")])
def test_every_colour_is_seen_on_its_page(palette, page):
    assert all(contrast(color, page) >= 3 for color in palette)


def test_no_two_arms_look_alike_and_the_zero_is_in_ink():
    arms = [f"arm {i}" for i in range(14)]
    found = looks(arms, "arm 3")
    assert found["arm 3"].color == 0
    assert [arm for arm in arms if found[arm].color == 0] == ["arm 3"]
    assert len(set(found.values())) == 14
    assert len({look.marker for look in list(found.values())[:8]}) == 8
    assert len({look.dash for look in list(found.values())[:5]}) > 3


def test_without_a_zero_no_arm_is_in_ink():
    assert looks(["rope"], None)["rope"].color != 0


def test_round_ticks_hold_the_values_between_them():
    assert nice(0, 4.2, 5) == [0, 1, 2, 3, 4, 5]
    assert nice(-1.2, 3.4, 4) == [-2, 0, 2, 4]
    assert nice(7, 7, 3)[0] <= 7 <= nice(7, 7, 3)[-1]
    assert nice(0, 0, 3)[-1] > 0


def test_decades_hold_the_values_between_them():
    assert decades(12, 480) == [10, 20, 50, 100, 200, 500]
    assert decades(0.5, 90_000)[0] <= 0.5
    assert decades(0.5, 90_000)[-1] >= 90_000


def test_a_bent_scale_shows_small_differences_beside_large_ones():
    ticks = bent_ticks(-0.5, 40)
    assert ticks == [-1, 0, 1, 3, 10, 30, 100]
    y = Scale(-1, 100, 300, 0, "bent")
    assert y(0) - y(1) > 0.1 * 300
    assert y(-1) == 300
    assert y(100) == 0


def test_a_logarithmic_scale_puts_equal_ratios_equally_apart():
    x = Scale(1, 100, 0, 10, "log")
    assert math.isclose(x(10), 5)


def test_labels_that_would_touch_move_apart_around_their_middle():
    found = apart([100, 100, 101, 200], 0, 300)
    assert found[3] == 200
    assert [after - before for before, after in pairwise(found[:3])] == [LINE, LINE]
    assert math.isclose(sum(found[:3]) / 3, 301 / 3)


def test_labels_stay_within_and_in_order():
    found = apart([290, 300, 298, 2, 1], 0, 300)
    assert min(found) >= 0
    assert max(found) <= 300
    assert found[4] < found[3] < found[0] < found[2] < found[1]


def test_words_are_escaped():
    assert "<b>" not in text("<b>", 0, 0) + told("<b>")
