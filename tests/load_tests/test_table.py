from dataclasses import replace

import pytest

from ropewalk.load_tests.common.types import Point
from ropewalk.load_tests.report.table import tables
from tests.load_tests.made_up import counted, failed, longctx, result

THREE = {"nope": 1, "rope": 1.0, "t5": 1.2}
LONGCTX = result(THREE, longctx(512, 2048))


def line(text: str, *words: str) -> str:
    return next(one for one in text.split("\n") if all(word in one for word in words))


def test_one_line_for_each_cell_and_variant():
    text = tables(LONGCTX)
    assert "16/16" in line(text, "longctx 512", "nope")
    numbers = line(text, "t5", "16/16").split()
    assert numbers[0] == "t5"
    # 10 ms, a sixteenth more for 512 of 8,192 tokens and a tenth for the load, 20 % more for t5.
    assert float(numbers[4]) == pytest.approx(13.95, abs=0.1)
    assert float(numbers[numbers.index("%") - 1]) == pytest.approx(20, abs=0.6)


def test_findings_and_definitions_are_below():
    text = tables(LONGCTX)
    assert "- Step latency by context: longctx. At 2,048 tokens of context, t5 costs" in text
    assert "TPOT is time per output token: (end − first text) / (tokens − 1)" in text


def test_failures_are_counted_and_shown_as_a_dash():
    text = tables(failed(LONGCTX, "t5", "status 500"))
    assert "0/16" in line(text, "t5", "–")
    assert "32 of 96 requests failed" in text


def test_warnings_are_there():
    counters = {variant: {} for variant in THREE}
    text = tables(
        replace(counted(LONGCTX, counters, "tokens differ."), warnings=("the client was late.",))
    )
    assert "warning: the client was late." in text
    assert "warning: t5: tokens differ. (8 runs)" in text


def test_one_variant_is_compared_with_nothing():
    text = tables(result({"rope": 1}, [Point("chat", "chat")]))
    assert "over" not in text.split("\n")[0]
    assert "chat, sync" in text


def test_nothing_measured():
    assert tables(replace(LONGCTX, runs=())).startswith("Nothing was measured.")


def test_a_p99_needs_a_hundred_requests():
    few = result({"rope": 1}, [Point("chat", "chat")])
    numbers = line(tables(few), "rope", "16/16").split()
    at = numbers.index("16/16")
    assert numbers[at + 2] == numbers[at + 4] == "–"
    many = [replace(one, outcomes=one.outcomes * 25) for one in few.runs]
    numbers = line(tables(replace(few, runs=tuple(many))), "rope", "400/400").split()
    at = numbers.index("400/400")
    assert float(numbers[at + 2]) > 0 and float(numbers[at + 4]) > 0
