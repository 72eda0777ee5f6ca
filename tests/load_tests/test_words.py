import pytest

from ropewalk.load_tests.common.statistics import METRICS
from ropewalk.load_tests.report.differences import Difference, unknown
from ropewalk.load_tests.report.formatting import (
    column,
    compared,
    defined,
    digits,
    fine_milliseconds,
    heading,
    interval,
    listed,
    percent,
)

MORE = Difference(1.031, 1.019, 1.044, 0.001, "slower")
LESS = Difference(0.8, 0.75, 0.85, 0.001, "faster")
SAME = Difference(1.001, 0.994, 1.008, 0.7, "no difference")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (9.999, "10.0"),
        (99.97, "100"),
        (12345, "12,345"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert digits(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000123, "0.012"), (0.0009994, "0.999"), (0.0009996, "1.00"), (1.5, "1,500")],
)
def test_short_times_are_told_to_the_microsecond(seconds, text):
    assert fine_milliseconds(seconds) == text


def test_shares_are_percent():
    assert percent(0.0312) == "3.1"
    assert percent(12.5) == "1,250"


def test_a_list_reads_as_one():
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_every_metric_has_a_heading_and_a_definition():
    for metric in METRICS:
        assert heading(metric)
        assert defined([metric]).endswith(".")
    assert column("ttft_p99") == "TTFT p99, ms"
    assert defined(["ttft_p50", "ttft_p99"]).count("TTFT is") == 1


def test_what_costs_more_is_said_with_its_interval():
    assert compared("At 8,192 tokens,", "nope", {"t5": MORE}, "itl_p50") == (
        "At 8,192 tokens, t5 costs 3.1 % (1.9 to 4.4) more per token than nope."
    )


def test_what_costs_less_is_said_without_signs():
    assert compared("Here,", "nope", {"t5": LESS}, "ttft_p50") == (
        "Here, t5 takes 20.0 % (15.0 to 25.0) less time to the first token than nope."
    )
    assert "fewer output tokens" in compared("", "nope", {"t5": LESS}, "output_tokens_per_s")


def test_no_difference_is_said_as_plainly():
    assert compared("Here,", "nope", {"rope": SAME}, "itl_p50") == (
        "Here, rope shows no difference from nope in time per token p50 (up to 0.8 % could hide)."
    )


def test_the_largest_difference_comes_first_and_equal_variants_last():
    found = {"rope": SAME, "t5": MORE, "learned": LESS, "alibi": SAME}
    assert compared("Here,", "nope", found, "itl_p50") == (
        "Here, learned costs 20.0 % (15.0 to 25.0) less per token than nope; "
        "t5 3.1 % (1.9 to 4.4) more; "
        "rope and alibi show no difference from nope (up to 0.8 % could hide)."
    )


def test_an_interval_keeps_its_signs():
    assert interval(SAME) == "+0.1 % (−0.6 to +0.8): no difference"


def test_what_is_unknown_is_said_with_its_reason():
    late = unknown("the client sent late")
    assert interval(late) == "unknown"
    assert compared("Here,", "nope", {"t5": MORE, "rope": late}, "itl_p50").endswith(
        "than nope; rope cannot be compared with nope: the client sent late."
    )
    assert compared("Here,", "nope", {"t5": late, "rope": late}, "itl_p50") == (
        "Here, no variant can be compared with nope: the client sent late."
    )
