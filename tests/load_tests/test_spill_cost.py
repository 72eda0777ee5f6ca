import json

import pytest

from ropewalk.load_tests.micro.spill_cost import (
    BESIDE,
    COMING,
    COMPUTED,
    LEAVING,
    RESTORED,
    main,
    table,
)


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
    one, two = (each[COMPUTED] for each in found["samples"])
    assert found["seconds"][COMPUTED]["least"] == min(one, two)
    assert "clock" not in found["environment"] and "clock" not in found["arguments"]


def test_no_option_promises_what_is_not_done(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert "--clock" not in told and ".svg" not in told


def test_steps_have_a_limit():
    taken = [0.003, 0.001, 0.002]
    rows = [line.split("|") for line in table({COMPUTED: taken, COMING: taken}, 1.0).splitlines()]
    assert [row[1] for row in rows[2:4]] == [COMPUTED, COMING]
    assert [row[2:5] for row in rows[2:4]] == [["2.00", "1.00", "3.00"]] * 2
    assert [row[5] for row in rows[2:4]] == ["", "2.00"]
