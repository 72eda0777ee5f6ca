import json
import xml.etree.ElementTree as ET

import pytest

from ropewalk.load_tests.micro import step_cost
from ropewalk.load_tests.micro.step_cost import AGAIN, costs_of, main, verdict
from ropewalk.report.statistics import Estimate

TINY = ["--context", "32", "--batch", "2", "--chunk", "8", "--device", "cpu"]


def test_measures_prints_and_writes(tmp_path, capsys):
    name = tmp_path / "costs"
    words = [*TINY, "--variants", "rope,t5:materialised", "--rounds", "6", "--prefill-rounds", "2"]
    status = main([*words, "--out", str(name)])
    out, told = capsys.readouterr()
    table = [line.split("|")[1:4] for line in out.splitlines()]
    variants = ["nope", "rope", "t5:materialised", AGAIN]
    assert [row[:2] for row in table[2:]] == [
        [work, variant] for work in ("decode", "prefill") for variant in variants
    ]
    assert all(float(row[2]) > 0 for row in table[2:])
    assert "decode: 6 rounds of 4 passes" in told

    found = json.loads((tmp_path / "costs.json").read_text())
    assert found["schema"] == 1 and found["kind"] == "ropewalk step cost"
    assert found["command"].startswith("python -m ropewalk.load_tests.micro.step_cost --context 32")
    assert found["environment"]["clock"] == "processor" and found["environment"]["torch"]
    assert [list(each) for each in found["samples"]["decode"]] == [variants] * 6
    assert len(found["samples"]["prefill"]) == 2
    rope = found["costs"]["decode"][1]
    assert rope["variant"] == "rope" and rope["limit"] == 1.02
    assert rope["ratio"]["low"] <= rope["ratio"]["median"] <= rope["ratio"]["high"]
    assert found["costs"]["prefill"][1]["ratio"]["high"] is None  # of two rounds
    assert found["costs"]["decode"][2]["verdict"] is None
    verdicts = {cost["verdict"] for each in found["costs"].values() for cost in each}
    assert status == int("does not hold" in verdicts)

    drawn = "".join(ET.parse(tmp_path / "costs.svg").getroot().itertext())
    assert "decode: time over nope" in drawn and "t5:materialised" in drawn


def test_a_part_can_be_left_out(capsys):
    main([*TINY, "--variants", "alibi", "--rounds", "0", "--prefill-rounds", "1"])
    assert "decode" not in capsys.readouterr().out


def taken(rope: float, t5: float) -> list[dict[str, float]]:
    """Rounds in which the machine slows down by ten, and noise of half a percent."""
    return [
        {"nope": drift, "rope": drift * rope * (1 + 0.005 * (i % 2)), "t5:table": drift * t5}
        for i, drift in enumerate([1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 10.0])
    ]


def test_costs_are_compared_within_their_round():
    nope, rope, table = costs_of(taken(1.01, 1.5), 1.02)
    assert nope.seconds == 6.0 and nope.ratio == Estimate(1, 1, 1)
    assert rope.ratio.low == pytest.approx(1.01) and rope.verdict == "holds"
    assert table.ratio.value == 1.5 and table.verdict is None and table.limit is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 1.02, "holds"),
        (1.0, 1.03, "undecided"),
        (1.021, 1.03, "does not hold"),
        (-float("inf"), float("inf"), "undecided"),
    ],
)
def test_verdict(low, high, expected):
    assert verdict(Estimate(1.0, low, high), 1.02) == expected


def test_a_limit_that_does_not_hold_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(step_cost, "_measure", lambda args: {"decode": taken(1.1, 1)})
    assert main([]) == 1
    row = "|decode|rope|6,633|+10.0 % (+10.0 to +10.5)|+2.0 %|does not hold|"
    assert row in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--chunk", "64"], "--chunk 64 is more than --context"),
        (["--rounds", "0", "--prefill-rounds", "0"], "leave nothing to measure"),
        (["--shape", "no"], "shape:no is no shape known here"),
        (["--variants", "no"], "There is no encoding 'no'"),
    ],
)
def test_what_cannot_be_measured(words, complaint, capsys):
    assert main([*TINY, *words]) == 2
    assert complaint in capsys.readouterr().err
