import json
import math
import random
import xml.etree.ElementTree as ET

import pytest

from ropewalk.load_tests.micro import scaling
from ropewalk.load_tests.micro.scaling import Growth, growth_of, main
from ropewalk.load_tests.micro.scaling_parts import SIZES, Part

TINY = ["--device", "cpu", "--batch", "1,2", "--context", "16,32", "--pool", "200,400"]
TINY += ["--queue", "2,4", "--prompt", "40,80", "--answer", "5,10"]


def test_measures_prints_and_writes(tmp_path, capsys):
    status = main([*TINY, "--rounds", "1", "--out", str(tmp_path / "scaling")])
    out, told = capsys.readouterr()
    rows = [line.split("|")[1:-1] for line in out.splitlines()[2:]]
    assert [row[2] for row in rows[:4]] == ["1", "2", "16", "32"]
    named = [row[0] for row in rows if row[0]]
    assert named[0] == "pass" and len(named) == len(rows) / 2 == 14
    assert {row[1] for row in rows if row[1]} == set(SIZES.values())
    assert all(float(row[3]) > 0 for row in rows)
    assert "whole answer, by tokens of the answer" in told

    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["schema"] == 1 and found["kind"] == "ropewalk scaling"
    assert [part["part"] for part in found["parts"]] == named
    queue = next(part for part in found["parts"] if part["along"] == "queue")
    assert queue["sizes"] == [2, 4] and queue["power"] == 0
    assert [set(each) for each in queue["samples"]] == [{"2", "4"}]
    assert status == int(any(part["too_fast"] for part in found["parts"]))
    drawn = "".join(ET.parse(tmp_path / "scaling.svg").getroot().itertext())
    assert "ms by blocks of the pool" in drawn and "ms by tokens of context" in drawn


def test_one_kind_of_size_alone(capsys):
    main([*TINY, "--rounds", "1", "--only", "queue"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[1] for row in rows} == {"requests queued", ""}


def part(power: float) -> Part:
    return Part("a part", "pool", power, lambda size: lambda: None)


def grown(power: float, *, fixed: float = 0.0, noise: float = 0.02) -> list[dict[int, float]]:
    """Seconds at four sizes, with the machine ten times as slow in some rounds."""
    draw = random.Random(0)
    return [
        {
            size: speed * (fixed + size**power) * math.exp(noise * draw.gauss(0, 1))
            for size in (1, 10, 100, 1000)
        }
        for speed in [1.0, 10.0, 3.0] * 5
    ]


def test_exponents_are_found_round_by_round():
    growth = growth_of(part(1), grown(1.5))
    assert growth.sizes == [1, 10, 100, 1000]
    assert [each.value for each in growth.exponents] == pytest.approx([1.5] * 3, abs=0.02)
    assert growth.seconds[0].value == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize(
    ("power", "its_work", "fixed", "too_fast"),
    [
        (1, 1, 0, False),
        (0, 0, 0, False),
        (1, 0, 0, True),
        (1, 0, 100, True),  # hidden by what is fixed at all sizes but the last
        (2, 1, 10000, True),
        (1, 1, 100, False),
        (0.1, 0, 0, False),
    ],
)
def test_what_grows_faster_than_its_work(power, its_work, fixed, too_fast):
    assert growth_of(part(its_work), grown(power, fixed=fixed)).too_fast == too_fast


def test_noise_alone_is_no_growth():
    assert not growth_of(part(0), grown(0, noise=1.0)).too_fast
    assert not growth_of(part(0), grown(1, noise=0.1)[:3]).too_fast  # too few for an interval


def test_what_cannot_be_told_is_not_acquitted(monkeypatch, capsys):
    assert growth_of(part(0), grown(0)).verdict == "as its work or slower"
    assert growth_of(part(0), grown(0, noise=1.0)).verdict == "undecided"
    monkeypatch.setattr(scaling, "_measure", lambda args: [(part(0), grown(1)[:3])])
    assert main([]) == 0
    assert capsys.readouterr().out.endswith("|0|undecided|\n")


def test_a_part_that_grows_too_fast_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "_measure", lambda args: [(part(0), grown(1, noise=0))])
    assert main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("|1,000|3,000,000|1.00 (1.00 to 1.00)|0|grows faster than its work|")


def test_one_size_has_no_growth():
    growth = growth_of(part(0), [{5: 1.0}] * 6)
    assert isinstance(growth, Growth) and not growth.exponents and not growth.too_fast


@pytest.mark.parametrize("count", ["0", "129"])
def test_rounds_that_would_outlast_the_requests(count, capsys):
    assert main([*TINY, "--rounds", count]) == 2
    assert (
        f"--rounds {count} is out of range; use a number from 1 to 128" in capsys.readouterr().err
    )
