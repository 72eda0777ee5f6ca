import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from ropewalk.load_tests.common.types import Point, Profile, Result
from ropewalk.load_tests.report.plot import context_axes, load_axes, measured, relative, subject
from ropewalk.load_tests.report.plots import plots
from ropewalk.report.page import Section
from ropewalk.report.svg import svg
from tests.load_tests.made_up import counted, failed, longctx, result

CHAT = Point("chat", "chat")
RATES = [Profile("poisson", rate=rate) for rate in (1, 2, 4)]
SIX = {"nope": 1, "rope": 1.05, "t5": 1.2, "alibi": 1.0, "learned": 1.0, "sinusoidal": 0.9}
SETTINGS = {
    "nope": {"encoding": "nope"},
    "t5:window": {"encoding": "t5", "setting": "window"},
    "t5:materialised": {"encoding": "t5", "setting": "materialised"},
}


@cache
def made(name: str) -> list[Section]:
    return plots(MANY[name])


def by_key(whole: Result | str) -> dict[str, Section]:
    """Of one of MANY, or of another result."""
    found = made(whole) if isinstance(whole, str) else plots(whole)
    assert len({plot.key for plot in found}) == len(found)
    return {plot.key: plot for plot in found}


def counters(**values: float) -> dict[str, float]:
    base = {
        'ropewalk_prompt_tokens_total{source="computed"}': 1000,
        'ropewalk_prompt_tokens_total{source="cached"}': 9000,
        "ropewalk_generated_tokens_total": 28,
        'ropewalk_requests_total{finish_reason="length"}': 4,
        "ropewalk_kv_written_bytes_total": 1024 * 512,
    }
    return base | {f"ropewalk_{name}": value for name, value in values.items()}


def shifts(outcome: str, seconds: float, rewritten: float) -> dict[str, float]:
    return counters(
        context_shift_seconds_sum=3 * seconds,
        context_shift_seconds_count=3,
        **{
            f'context_shifts_total{{outcome="{outcome}"}}': 3,
            'kv_rewritten_entries_total{cause="context_shift"}': 3 * rewritten,
        },
    )


MANY = {
    "longctx": result(SIX, longctx(512, 2048, 8192)),
    "one context": result(SIX, longctx(512)),
    "rates": result(SIX, [CHAT], RATES),
    "one variant": result({"rope": 1}, [CHAT], RATES),
    "settings": result(dict.fromkeys(SETTINGS, 1), longctx(512, 2048), variants=SETTINGS),
    "a variant failed": failed(result(SIX, longctx(512, 2048)), "t5", "status 500 <oops>"),
    "counters": counted(
        result({"nope": 1, "rope": 1}, [CHAT]),
        {"nope": shifts("reindexed", 0.001, 0), "rope": shifts("rerotated", 0.004, 96)},
    ),
}


def drawn_of(key: str) -> str:
    """Which of MANY a plot is drawn of, which takes long. test_page.py draws those of odd ones."""
    return next(name for name in MANY if any(plot.key == key for plot in made(name)))


@pytest.mark.parametrize("name", MANY)
def test_every_plot_is_well_formed_and_has_its_numbers(name):
    found = made(name)
    assert found
    for plot in found:
        assert plot.pictures
        if name == drawn_of(plot.key):
            for chart in plot.pictures:
                assert ElementTree.fromstring(svg(chart, "c")).get("aria-label")
        assert {len(row) for row in plot.table} == {len(plot.table[0])}
        assert all(sentence.endswith((".", "”")) for sentence in plot.findings)


def test_step_latency_by_context_comes_first_with_its_difference_to_the_baseline():
    plot = made("longctx")[0]
    assert plot.key == "longctx"
    assert len(plot.pictures) == 2
    longest, shortest = plot.findings
    assert re.match(r"At 8,192 tokens of context, t5 costs (19\.[5-9]|20\.[0-4]) % \(", longest)
    assert re.search(r"; rope (4\.[5-9]|5\.[0-4]) % \([^)]+\) more;", longest)
    assert re.search(r"; sinusoidal (9\.[5-9]|10\.[0-4]) % \([^)]+\) less;", longest)
    assert "alibi and learned show no difference from nope" in longest
    assert shortest.startswith("At 512 tokens of context, ")


def test_marks_are_where_their_findings_say():
    made_up = subject(MANY["longctx"])
    (axis,) = context_axes(made_up)
    found = {
        one.label: one.marks for one in relative(made_up, axis, "itl_p50", "nope", made_up.others)
    }
    assert list(found) == ["rope", "t5", "alibi", "learned", "sinusoidal"]
    assert [mark.found.value for mark in found["t5"]] == pytest.approx([20, 20, 20], abs=0.5)
    assert all(
        mark.found.low < mark.found.value < mark.found.high
        for marks in found.values()
        for mark in marks
    )
    assert [mark.hollow for mark in (*found["t5"], *found["alibi"])] == [False] * 3 + [True] * 3
    milliseconds = {one.label: one.marks for one in measured(made_up, axis, "itl_p50")}
    assert milliseconds["nope"][-1].found.value == pytest.approx(21, abs=0.2)


def test_findings_change_with_the_data():
    plot = plots(result(SIX | {"t5": 1.4}, longctx(512, 2048)))[0]
    assert re.match(
        r"At 2,048 tokens of context, t5 costs (39\.[5-9]|40\.[0-4]) %", plot.findings[0]
    )


def test_without_a_baseline_there_are_figures_and_no_differences():
    plot = plots(result({"rope": 1}, longctx(512, 2048)))[0]
    assert len(plot.pictures) == 1
    assert plot.findings[0].startswith("At 2,048 tokens of context, time per token p50 of rope is")
    assert plot.table[0] == ("at", "variant", "time per token p50, ms")


def test_the_dearest_setting_is_compared_with_the_cheapest():
    factors = {"nope": 1, "t5:window": 1.1, "t5:materialised": 1.65}
    plot = by_key(result(factors, longctx(512, 2048), variants=SETTINGS))["t5-settings"]
    assert re.match(
        r"At 2,048 tokens of context, t5:materialised costs (49\.[5-9]|50\.[0-4]) %",
        plot.findings[0],
    )
    assert plot.findings[0].endswith("more per token than t5:window.")


def test_one_variant_for_each_encoding_needs_no_plot_of_settings():
    assert not [key for key in by_key("longctx") if key.endswith("-settings")]


def test_several_rates_give_curves_and_throughput_against_latency():
    found = by_key("rates")
    assert found["chat-rate"].pictures[0].key == "lines"
    assert len(found["chat-rate"].pictures) == 4
    assert found["chat-rate-throughput"].findings[0].startswith("Under chat, poisson:4, t5")


def test_arrivals_of_another_burstiness_are_another_curve():
    bursts = [Profile("gamma", rate=rate, burstiness=0.25) for rate in (1, 2, 4)]
    sync, closed = Profile("sync"), Profile("closed", concurrency=4)
    whole = result(SIX, [CHAT], [sync, closed, *RATES, *bursts])
    axes = {(axis.name, axis.by): axis for axis in load_axes(subject(whole))}
    assert list(axes) == [
        ("chat", "concurrency"),
        ("chat poisson", "rate"),
        ("chat gamma of burstiness 0.25", "rate"),
    ]
    assert [[axis.x(cell) for cell in axis.cells] for axis in axes.values()] == [
        [1, 4], [1, 2, 4], [1, 2, 4],
    ]  # fmt: skip
    assert {"chat-poisson-rate", "chat-gamma-of-burstiness-0.25-rate"} <= set(by_key(whole))


def test_those_who_left_were_not_answered_in_full():
    whole = result({"nope": 1, "rope": 1}, [CHAT])
    first = whole.runs[0]
    outcomes = (replace(first.outcomes[0], left=True), *first.outcomes[1:])
    whole = replace(whole, runs=(replace(first, outcomes=outcomes), *whole.runs[1:]))
    (said,) = by_key(whole)["client"].findings
    assert said.startswith("31 requests were answered in full, 1 left as planned.")


def test_one_load_gives_a_dot_for_each_variant():
    plot = by_key(result(SIX, [CHAT]))["chat-concurrency"]
    assert {chart.key for chart in plot.pictures} == {"dots"}


def test_goodput_is_there_where_objectives_were_given():
    whole = result({"nope": 1, "t5": 1.5}, [CHAT], noise=0.001)
    assert not [key for key in by_key(whole) if "goodput" in key]
    # TPOT is 11 ms and 16.5 ms.
    strict = by_key(replace(whole, arguments={"slo": "tpot=14ms"}))["chat-concurrency-goodput"]
    assert strict.findings == (
        "Under chat, sync, nope met the objectives in 100 % of the requests, t5 in 0 %.",
    )
    assert strict.table[2][:3] == ("chat, sync", "t5", "0 (0–0)")
    mild = by_key(replace(whole, arguments={"slo": "tpot=14ms,ttft=10s"}))[
        "chat-concurrency-goodput"
    ]
    assert "ttft=10s" in mild.note
    loose = by_key(replace(whole, arguments={"slo": "tpot=20ms"}))["chat-concurrency-goodput"]
    assert "every variant met the objectives in 100 %" in loose.findings[0]


def test_goodput_names_no_winner_among_variants_that_are_alike():
    whole = result({"nope": 1, "rope": 1}, [CHAT], noise=0.05)
    (said,) = by_key(replace(whole, arguments={"slo": "tpot=11.2ms"}))[
        "chat-concurrency-goodput"
    ].findings
    shares = r"nope met the objectives in \S+ % \(\S+\) of the requests, rope in \S+ % \(\S+\)"
    assert re.fullmatch(rf"Under chat, sync, {shares}\.", said)


def test_keys_are_fit_for_a_link():
    whole = result({"nope": 1, "t5": 1.5}, [Point("file", "file:a b/c.jsonl")])
    assert "file:a-b-c.jsonl-concurrency" in by_key(whole)


def test_goodput_over_several_loads_is_a_curve():
    whole = result({"nope": 1, "t5": 1.5}, [CHAT], RATES)
    plot = by_key(replace(whole, arguments={"slo": "ttft=150ms"}))["chat-rate-goodput"]
    assert plot.pictures[0].key == "lines"
    assert len(plot.findings) == 3


def test_a_variant_that_served_nothing_is_left_out_and_reported():
    found = by_key("a variant failed")
    assert (
        "; t5 cannot be compared with nope: no round has this figure."
        in found["longctx"].findings[0]
    )
    assert not any("t5" in svg(chart, "c") for chart in found["longctx"].pictures)
    assert found["client"].findings[0].startswith("32 of 192 requests failed, 32 of them with")
    assert found["client"].table[3][:3] == ("t5", "32", "32")


def test_nothing_served_at_all():
    whole = result({"nope": 1, "rope": 1}, longctx(512, 2048))
    for variant in ("nope", "rope"):
        whole = failed(whole, variant, "connection refused")
    found = by_key(whole)
    assert set(found) == {"client", "order"}


def test_nothing_measured_at_all():
    assert plots(replace(MANY["longctx"], runs=())) == []


def test_one_reason_is_said_once():
    plot = by_key(result({"nope": 1, "rope": 1}, [CHAT], rounds=1))["chat-concurrency"]
    (said,) = plot.findings
    assert said.startswith("Under chat, sync, rope cannot be compared with nope: ")


def test_what_the_cache_did_is_over_computed_tokens():
    plot = by_key("counters")["chat-cache"]
    # Four runs of 1,024 computed tokens each, and 524,288 bytes in each.
    assert "Bytes written per computed token: 512 for every variant." in plot.findings
    assert "Entries rewritten: 1,152 for rope, 0 for nope." in plot.findings


def test_the_cost_of_a_shift_is_per_shift():
    plot = by_key("counters")["chat-shift"]
    assert plot.findings[0].startswith("A shift takes 4.00 ms under rope and 1.00 ms under nope.")
    # Time and keys; nothing was recomputed or moved, which needs no picture.
    assert len(plot.pictures) == 2
    assert "Keys rewritten per shift: 96.0 for rope, 0 for nope." in plot.findings
    assert plot.table[1][:3] == ("nope", "12.0", "1.00")


def test_without_counters_or_shifts_those_plots_are_left_out():
    assert not [key for key in by_key("rates") if key.endswith(("-cache", "-shift"))]
    plain = counted(result({"nope": 1}, [CHAT]), {"nope": counters()})
    assert "chat-shift" not in by_key(plain)
    assert "chat-cache" in by_key(plain)


def test_a_server_that_counts_other_things_is_not_said_to_have_rewritten_nothing():
    foreign = {"vllm:generation_tokens_total": 24.0}
    whole = counted(result({"nope": 1, "rope": 1}, [CHAT]), {"nope": counters(), "rope": foreign})
    assert by_key(whole)["chat-cache"].table[1:] == [("nope", "0", "512", "0", "0", "0")]


def test_a_machine_that_drifts_is_seen():
    whole = result({"nope": 1, "rope": 1}, longctx(512), rounds=4, noise=0.0005)
    assert "were 0." in by_key(whole)["order"].findings[0]
    slow = result({"nope": 1.3, "rope": 1.3}, longctx(512), rounds=4, noise=0.0005)
    late = [run for run in slow.runs if run.round >= 2]
    mixed = replace(whole, runs=tuple([r for r in whole.runs if r.round < 2] + late))
    said = by_key(mixed)["order"].findings[0]
    assert "were 2" in said  # 30 % over the median between
    assert re.match(r"Runs of round [34] were \S+ % slower than those of round [12] ", said)
    assert {row[3] for row in by_key(mixed)["order"].table[1:]} == {"1", "2", "3", "4"}
