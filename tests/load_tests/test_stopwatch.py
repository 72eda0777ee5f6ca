import itertools

import pytest

from ropewalk.load_tests.micro.profile_engine import Stopwatch


def ticking():
    """A watch whose clock goes on by one whenever it is looked at."""
    ticks = itertools.count()
    return Stopwatch(lambda: float(next(ticks)))


def test_an_inner_part_interrupts_the_outer_one():
    watch = ticking()
    with watch.during("step"):
        with watch.during("pass"), watch.during("layer"):
            pass
        with watch.during("pass"):
            pass
    # Looks: 0 step, 1 pass, 2 layer, 3 layer ends, 4 pass ends, 5 pass, 6 ends, 7 step ends.
    assert watch.drain() == {"step": 1 + 1 + 1, "pass": 1 + 1 + 1, "layer": 1}
    assert watch.drain() == {}


def test_what_is_between_two_parts_is_nobodys():
    watch = ticking()
    with watch.during("a"):
        pass
    with watch.during("b"):
        pass
    assert watch.drain() == {"a": 1, "b": 1}


def test_a_part_that_raises_ends_there():
    watch = ticking()
    with watch.during("step"), pytest.raises(ValueError), watch.during("pass"):
        raise ValueError
    assert watch.drain() == {"step": 2, "pass": 1}


def test_time_can_be_moved():
    watch = ticking()
    with watch.during("pass"):
        pass
    watch.move(0.25, "pass", "norm")
    assert watch.drain() == {"pass": 0.75, "norm": 0.25}
