from dataclasses import replace

import pytest

from ropewalk.load_tests.common.statistics import (
    METRICS,
    RATES,
    figures,
    goodput,
    parse_slo,
    percentile,
    samples,
)
from ropewalk.load_tests.common.types import Outcome, Point, Profile, Run

POINT = Point("chat", "64", 64)
SYNC = Profile("sync")


def outcome(intended=0.0, first=0.5, gap=0.1, tokens=11, **changes):
    """Sent as intended; one token a chunk."""
    chunks = tuple((intended + first + gap * index, index + 1) for index in range(tokens))
    values = {
        "intended": intended,
        "sent": intended,
        "ended": chunks[-1][0],
        "chunks": chunks,
        "prompt_tokens": 64,
        "output_tokens": tokens,
    }
    return Outcome(**(values | changes))


def run_of(*outcomes, profile=SYNC, steady=(0.0, 10.0)):
    return Run("rope", POINT, profile, 0, tuple(outcomes), *steady)


def test_latencies_by_definition():
    found = figures(run_of(outcome(sent=0.2)))
    assert found.values["ttft_p50"] == pytest.approx(0.5)
    assert found.values["ttft_from_wire_p50"] == pytest.approx(0.3)
    assert found.values["itl_p50"] == pytest.approx(0.1)
    assert found.values["tpot_p50"] == pytest.approx(0.1)
    assert found.values["e2e_p99"] == pytest.approx(1.5)
    assert found.lag_p99 == pytest.approx(0.2)


def test_a_chunk_of_several_tokens_is_one_gap_over_its_tokens():
    bunched = outcome(chunks=((1.0, 1), (1.4, 5), (1.5, 6)), ended=1.5, output_tokens=6)
    assert samples("itl", [bunched]) == pytest.approx([0.1, 0.1])
    assert samples("tpot", [bunched]) == pytest.approx([0.1])


def test_time_per_token_counts_the_end_and_needs_two_tokens():
    late_end = outcome(ended=2.5)  # two seconds after the first text, ten tokens later
    assert samples("tpot", [late_end]) == pytest.approx([0.2])
    assert "tpot_p50" not in figures(run_of(outcome(tokens=1))).values


def test_percentiles_interpolate():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 1.0], 90) == pytest.approx(0.9)
    assert percentile([], 99) == 0.0


def test_throughput_counts_what_arrived_in_the_window():
    found = figures(run_of(outcome(), steady=(0.55, 1.05)))  # tokens 2 to 6 of 11, no first text
    assert found.values["output_tokens_per_s"] == pytest.approx(5 / 0.5)
    assert found.values["total_tokens_per_s"] == pytest.approx(5 / 0.5)
    whole = figures(run_of(outcome(), steady=(0.0, 1.5001)))
    assert whole.values["output_tokens_per_s"] == pytest.approx(11 / 1.5, rel=1e-3)
    assert whole.values["total_tokens_per_s"] == pytest.approx(75 / 1.5, rel=1e-3)


def test_tokens_without_text_arrive_with_the_end():
    silent = outcome(chunks=(), ended=2.0, output_tokens=1)
    found = figures(run_of(silent, steady=(0.0, 2.0)))
    assert found.values["output_tokens_per_s"] == pytest.approx(0.5)
    assert found.values["ttft_p50"] == pytest.approx(2.0)


def test_an_empty_window_has_no_rates():
    found = figures(run_of(outcome(), steady=(0.0, 0.0)))
    assert not found.values.keys() & RATES
    assert goodput(run_of(outcome(), steady=(0.0, 0.0)), {}) is None


def test_the_first_wave_is_left_out():
    closed = Profile("closed", concurrency=2)
    wave = [outcome(first=5.0), outcome(0.1, first=5.0), outcome(6.0), outcome(6.5)]
    run = run_of(*wave, profile=closed, steady=(6.0, 7.0))
    found = figures(run)
    assert found.values["ttft_p50"] == found.values["ttft_p99"] == pytest.approx(0.5)
    assert found.served == 4
    assert goodput(run, {}).requests_per_s == 2  # the one that opens the window included


def test_failures_are_counted_by_reason_and_never_timed():
    cut = outcome(first=0.001, error="the stream ended without [DONE]")
    found = figures(run_of(outcome(), cut, cut, outcome(error="status 500")))
    assert found.failures == {"the stream ended without [DONE]": 2, "status 500": 1}
    assert found.served == 1
    assert found.values["ttft_p50"] == pytest.approx(0.5)
    assert found.values["output_tokens_per_s"] == pytest.approx(11 / 10)


def test_clients_that_left_are_apart_but_their_tokens_arrived():
    found = figures(run_of(outcome(), outcome(first=3.0, tokens=2, left=True)))
    assert (found.served, found.failures) == (1, {})
    assert found.values["ttft_p99"] == pytest.approx(0.5)
    assert found.values["output_tokens_per_s"] == pytest.approx(13 / 10)


def test_nothing_served_leaves_no_figures():
    found = figures(run_of(outcome(error="status 500")))
    assert found.values == {}
    assert not found.client_late


def test_a_late_client_is_said():
    assert not figures(run_of(outcome(sent=0.02))).client_late
    assert figures(run_of(outcome(sent=0.03))).client_late  # above 5 % of half a second


def test_every_metric_has_a_value_by_name():
    assert tuple(figures(run_of(outcome())).values) == METRICS


def test_objectives_are_read():
    assert parse_slo("ttft=200ms, tpot=0.05s") == pytest.approx({"ttft": 0.2, "tpot": 0.05})
    for wrong in ("ttft", "ttft=200", "itl=5ms", "ttft=-1ms", ""):
        with pytest.raises(ValueError, match="is no objective"):
            parse_slo(wrong)


def test_goodput_counts_requests_that_meet_every_objective():
    slow, fast = outcome(1.0, first=0.6), outcome(2.0, first=0.2)
    failed = replace(fast, error="status 500")
    run = run_of(slow, fast, failed, outcome(3.0, first=0.2, left=True))
    found = goodput(run, {"ttft": 0.5, "tpot": 0.2})
    assert found.share == pytest.approx(1 / 3)
    assert found.requests_per_s == pytest.approx(1 / 10)
    assert found.tokens_per_s == pytest.approx(11 / 10)
    assert goodput(run, {"ttft": 0.5, "tpot": 0.05}).share == 0.0


def test_good_tokens_are_never_more_than_all():
    late = outcome(9.0)  # tokens 6 to 11 come after the window
    found = goodput(run_of(outcome(), late), {})
    assert found.tokens_per_s == pytest.approx((11 + 6) / 10)
    whole = figures(run_of(outcome(), late)).values["output_tokens_per_s"]
    assert found.tokens_per_s == pytest.approx(whole)
    before = goodput(run_of(outcome(), outcome(9.0), steady=(0.95, 10.0)), {})
    assert before.requests_per_s == pytest.approx(1 / 9.05)  # of the one that began in the window
    assert before.tokens_per_s == pytest.approx((6 + 6) / 9.05)
