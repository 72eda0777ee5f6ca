import json

from ropewalk.load_tests.micro.spill_cost import (
    BESIDE,
    COMING,
    COMPUTED,
    LEAVING,
    RESTORED,
    main,
    table,
)
from ropewalk.report.statistics import Estimate


def test_measures_prints_and_writes(tmp_path, capsys):
    words = ["--shape", "tiny", "--context", "200", "--batch", "3", "--rounds", "2"]
    status = main([*words, "--device", "cpu", "--out", str(tmp_path / "spill")])
    assert status in (0, 1)
    assert "times faster than computed (limit 5)" in capsys.readouterr().out
    found = json.loads((tmp_path / "spill.json").read_text())
    assert found["kind"] == "ropewalk spill cost"
    names = [COMPUTED, RESTORED, BESIDE, COMING, LEAVING]
    assert [list(each) for each in found["samples"]] == [names] * 2
    assert all(seconds > 0 for each in found["samples"] for seconds in each.values())


def test_steps_have_a_limit():
    one = Estimate(0.001, 0.001, 0.001)
    rows = [line.split("|") for line in table({COMPUTED: one, COMING: one}, one).splitlines()]
    assert [row[1] for row in rows[2:4]] == [COMPUTED, COMING]
    assert [row[5] for row in rows[2:4]] == ["", "2.00"]
