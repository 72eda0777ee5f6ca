import json
import sys

import pytest

from ropewalk.load_tests.micro import roofline
from ropewalk.load_tests.peers.peers import main

FAKE = f"{sys.executable} -m tests.load_tests.sse_server {{port}}"
BASE = ["--model", "weights", "--ours", FAKE]


@pytest.fixture(autouse=True)
def little(monkeypatch, outlined):
    """Memory is measured with little of it."""
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 1 << 20})


def test_two_systems_take_turns(capsys, tmp_path):
    weights = tmp_path / "bf16" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(bytes(1000))
    options = ["--systems", "ropewalk:a,ropewalk:b", "--work", "one,eight", "--runs", "2"]
    out = tmp_path / "out"
    options += ["--requests-per-worker", "2", "--model", str(tmp_path), "--out", str(out)]
    assert main([*BASE, *options]) == 0
    result = json.loads((out / "result.json").read_text())
    assert (list(result["variants"]), result["baseline"]) == (
        ["ropewalk:a", "ropewalk:b"],
        "ropewalk:a",
    )
    turns = [(run["round"], run["variant"][-1]) for run in result["runs"]]
    assert turns == [(round, variant) for round in (0, 1) for variant in "ab" for _ in range(2)]
    printed = capsys.readouterr().out
    assert "ropewalk:a is better by" in printed
    for title in ("one stream, 128 in", "of the bound", "8 conc", "start to first", "memory after"):
        assert title in printed
    assert "prefill of 1,024" not in printed
    lives = result["environment"]["processes"]["ropewalk:b"]
    assert [life["round"] for life in lives] == [0, 1]
    assert all(life["start_s"] > 0 and life["loaded_bytes"] > 1 << 20 for life in lives)
    assert (out / "report.html").exists()


def test_a_system_that_does_not_start_is_status_2(capsys, tmp_path):
    command = f"{sys.executable} -c print('broken',{{port}})"
    assert main(["--model", "weights", "--ours", command, "--out", str(tmp_path)]) == 2
    assert "ended at its start" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_told_before_measuring(capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    assert main([*BASE, "--out", str(tmp_path / "taken")]) == 2
    captured = capsys.readouterr()
    assert "File exists" in captured.err
    assert "starting" not in captured.err


def test_what_was_measured_before_a_failure_is_reported(capsys, tmp_path):
    missing = tmp_path / "python"
    missing.write_text("not a program")
    options = ["--peer", f"llamacpp={missing}", "--work", "one", "--out", str(tmp_path)]
    assert main([*BASE, *options, "--requests-per-worker", "1"]) == 2
    captured = capsys.readouterr()
    assert "Permission denied" in captured.err
    assert "warning: The comparison ended early" in captured.out
    assert list(json.loads((tmp_path / "result.json").read_text())["variants"]) == [
        "ropewalk:bfloat16"
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--systems", "sglang:x"], "is not PROGRAM:DTYPE"),
        (["--systems", "vllm:bfloat16"], "add --peer vllm=PATH"),
        (["--peer", "vllm=/no/such"], "there is no file /no/such"),
        (["--work", "two"], "there is no work 'two'"),
        (["--runs", "0"], "'0' is not a number from 1 up"),
    ],
)
def test_wrong_options(capsys, options, reason):
    with pytest.raises(SystemExit):
        main([*BASE, *options])
    assert reason in capsys.readouterr().err
