import json
from dataclasses import replace

import pytest

from load_tests.cpu import CpuShares
from load_tests.measure import RunFigures
from load_tests.report import (
    Cell,
    as_json,
    ratio_table,
    results_table,
    spread,
    table,
    warnings,
    write_json,
)

RUN = RunFigures(
    requests=64,
    failed=0,
    errors={},
    total_s=10.0,
    output_tokens=1000,
    output_tokens_per_s=100.0,
    prompt_tokens_per_s=50.0,
    ttft_p50_ms=200.0,
    ttft_p99_ms=300.0,
    tpot_p50_ms=20.0,
    lag_p99_ms=0.1,
    prompt_tokens_off=0,
    cpu=CpuShares(0.8, 0.1, 0.034),
)


def speeds(*values: float) -> tuple[RunFigures, ...]:
    return tuple(replace(RUN, output_tokens_per_s=value) for value in values)


def test_the_table_is_aligned():
    text = table(("name", "n"), [["a", "1"], ["longer", "1000"]])
    assert text.split("\n") == [
        "name       n",
        "------  ----",
        "a          1",
        "longer  1000",
    ]


def test_medians_and_spread():
    found = spread([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    assert str(found) == "2.00 (1.00–3.00)"
    assert str(spread([1234.5])) == "1234"
    assert str(spread([12.34, 12.34])) == "12.3"
    assert spread([]) is None
    assert spread([1.0, None]) is None


def test_a_line_of_the_report():
    cell = Cell("closed c=32", (*speeds(90, 110), replace(RUN, failed=4)))
    header, _, line = results_table([cell]).split("\n")
    assert "output tok/s" in header
    assert line.startswith("closed c=32  188/192")
    assert "100 (90.0–110)" in line
    assert line.endswith("3.40")


def test_what_was_not_measured_is_a_dash():
    line = results_table([Cell("prefill", (replace(RUN, tpot_p50_ms=None, cpu=None),))])
    assert line.split("\n")[2].count("–") == 2


def test_ratios_are_of_medians_with_the_range_over_turns():
    ours, theirs = Cell("closed", speeds(160, 200, 240)), Cell("closed", speeds(100, 100, 80))
    line = ratio_table([ours], [theirs]).split("\n")[2]
    assert "2.00 (1.60–3.00)" in line


@pytest.mark.parametrize("missing", [None, 0.0])
def test_a_ratio_without_both_figures_is_a_dash(missing):
    other = Cell("closed", (replace(RUN, tpot_p50_ms=missing),))
    line = ratio_table([Cell("closed", (RUN,))], [other]).split("\n")[2]
    assert line.split() == ["closed", "1.00", "1.00", "–", "1.00"]


def test_ratio_tables_need_the_same_lines():
    with pytest.raises(ValueError, match="argument 2"):
        ratio_table([Cell("a", (RUN,))], [])


def test_doubts_are_said():
    failed = replace(RUN, failed=2, errors={"cut": 2})
    late = replace(RUN, lag_p99_ms=11.0)
    off = replace(RUN, prompt_tokens_off=3)
    cells = [Cell(name, (RUN, run)) for name, run in [("a", failed), ("b", late), ("c", off)]]
    assert warnings(cells) == [
        "a: 2 failed: cut",
        "b: the client sent late; its latencies prove nothing.",
        "c: the server counts other prompt lengths in 3 requests.",
    ]
    assert warnings([Cell("fine", (RUN, RUN))]) == []


def test_json_holds_every_run(tmp_path):
    result = as_json("bench", {"runs": 2}, [Cell("stream", (RUN, RUN))])
    write_json(tmp_path / "r.json", result)
    read = json.loads((tmp_path / "r.json").read_text())
    assert read == json.loads(json.dumps(result))
    assert (read["schema"], read["kind"], read["arguments"]) == (1, "bench", {"runs": 2})
    assert [len(cell["runs"]) for cell in read["cells"]] == [2]
    assert read["cells"][0]["runs"][0]["cpu"]["other"] == 0.034
    assert read["environment"]["cores"] >= 1
