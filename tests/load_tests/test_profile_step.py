import json

import pytest

from ropewalk.load_tests.micro import profile_http, profile_step
from ropewalk.load_tests.micro.profile_engine import ATTENTION, LINEAR, PARTS, REST, StepTimes
from ropewalk.load_tests.micro.profile_step import Profile, main, table

TINY = ["--profile-step", "--serve", "shape:small", "--context", "20", "--steps", "3"]


def test_serves_a_shape_by_default(monkeypatch):
    asked = []
    monkeypatch.setattr(profile_step, "_measure", lambda args: asked.append(args.serve) or [])
    assert main(["--profile-step"]) == 0
    assert asked == ["smollm2"]


def test_measures_prints_and_writes(tmp_path, capsys):
    name = tmp_path / "profile"
    words = [*TINY, "--encodings", "rope,t5:table", "--batch", "2", "--device", "cpu"]
    assert main([*words, "--out", str(name)]) == 0
    out, told = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines() if "context 20" in line] == [
        "rope",
        "t5:table",
    ]
    assert "|part|batch 2, ms|of the step|" in out
    assert "t5:table, batch 2" in told

    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["schema"] == 1 and found["kind"] == "ropewalk profile step"
    assert found["environment"]["clock"] == "wall"
    assert [each["variant"] for each in found["profiles"]] == ["rope", "t5:table"]
    for profile in found["profiles"]:
        assert list(profile["steps"]) == list(profile["outside"]) == ["2"]
        assert set(profile["steps"]["2"]["parts"]) <= set(PARTS)
        assert list(profile["outside"]["2"]) == list(profile_http.PARTS)


def profile(executor):
    def times(factor):
        return StepTimes({LINEAR: 0.006 * factor, ATTENTION: 0.001, REST: 0.0005}, 0.007)

    outside = {1: {"HTTP": 0.00015}, 8: {"HTTP": 0.001}}
    return Profile("rope", executor, {1: times(1), 8: times(2)}, outside)


def test_table():
    caption, empty, header, _rule, *lines = table(profile("cpu"), 512).splitlines()
    assert caption == "rope, context 512, computed by the cpu executor" and not empty
    assert header == "|part|batch 1, ms|of the step|batch 8, ms|of the step|"
    assert lines == [
        "|linear layers|6.00|80.0 %|12.0|88.9 %|",
        "|attention|1.00|13.3 %|1.00|7.4 %|",
        "|rest|0.500|6.7 %|0.500|3.7 %|",
        "|**step**|7.50|100 %|13.5|100 %|",
        "|step, not timed|7.00|93.3 %|7.00|51.9 %|",
        "|in parallel: HTTP|0.150|2.0 %|1.00|7.4 %|",
    ]


def test_the_caption_says_how_it_was_measured():
    assert "computed by the torch executor" in table(profile("torch"), 512)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--serve", "family"], "family cannot be profiled; use shape:small"),
        (["--serve", "no"], "'no' cannot be served"),
        (["--serve", "shape:no"], "shape:no is no shape known here"),
        (["--encodings", "no"], "There is no encoding 'no'"),
        (["--batch", "0"], "'0' is not a number from 1 up"),
    ],
)
def test_what_cannot_be_measured(words, complaint, capsys):
    try:
        status = main([*TINY, *words])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert complaint in capsys.readouterr().err
