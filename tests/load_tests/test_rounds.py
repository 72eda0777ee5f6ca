import random
from math import inf

import pytest
import torch

from ropewalk.load_tests.common.rounds import clock_of, ratios, rounds, seconds
from ropewalk.report.statistics import Estimate, median_of


def test_every_call_runs_once_in_a_round_and_the_first_round_is_not_told():
    ran = []
    calls = {name: lambda name=name: ran.append(name) for name in "abcdef"}
    taken = list(rounds(calls, 20, "processor", "seed"))
    assert [list(each) for each in taken] == [list("abcdef")] * 20
    orders = [tuple(ran[at : at + 6]) for at in range(0, len(ran), 6)]
    assert len(orders) == 21 and all(sorted(order) == list("abcdef") for order in orders)
    assert len(set(orders)) > 15


def test_the_seed_decides_the_order():
    def order(seed):
        ran = []
        calls = {name: lambda name=name: ran.append(name) for name in "abcdef"}
        list(rounds(calls, 3, "processor", seed))
        return ran

    assert order("one") == order("one") != order("two")


def test_processor_time_is_not_spent_by_waiting():
    import time

    def wait():
        time.sleep(0.05)

    assert seconds(wait, "wall") >= 0.05 > seconds(wait, "processor")


@pytest.mark.parametrize(
    ("wanted", "device", "clock"),
    [
        (None, "cpu", "processor"),
        ("wall", "cpu", "wall"),
        (None, "cuda", "cuda"),
        ("wall", "cuda", "wall"),
        ("processor", "cuda", "cuda"),
    ],
)
def test_clock(wanted, device, clock):
    assert clock_of(wanted, torch.device(device)) == clock


def test_interval_by_order():
    # Binomial tables: 6 values take the ends, 20 the 6th from each, 100 the 40th and 61st.
    assert median_of([3, 1, 2, 6, 5, 4]) == Estimate(3.5, 1, 6)
    assert median_of(range(1, 21)) == Estimate(10.5, 6, 15)
    assert median_of(range(1, 101)) == Estimate(50.5, 40, 61)


def test_too_few_values_have_no_interval():
    assert median_of([1, 2, 3, 4, 5]) == Estimate(3, -inf, inf)


def test_interval_of_very_many_values():
    found = median_of(range(3001))
    assert found.value == 1500 and 1440 < found.low < 1450


def test_interval_holds_the_median_as_often_as_it_says():
    draw = random.Random(0)
    found = [median_of([draw.lognormvariate(0, 1) for _ in range(21)]) for _ in range(2000)]
    assert 0.95 <= sum(each.low <= 1 <= each.high for each in found) / len(found) <= 0.985


def test_ratios_are_of_the_same_round():
    taken = [{"base": 1.0, "one": 2.0}, {"base": 10.0, "one": 11.0}]
    assert ratios(taken, "one", "base") == [2.0, 1.1]
