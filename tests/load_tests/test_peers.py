import json
import sys

import pytest

from load_tests.peers import main

FAKE = f"{sys.executable} -m tests.load_tests.sse_server {{port}}"
REQUIRED = ["--peer-python", sys.executable, "--model", "weights"]
SMALL = ["--prompt-tokens", "4", "--output-tokens", "3", "--requests-per-worker", "1"]


def test_two_systems_take_turns(capsys, tmp_path):
    options = ["--systems", "ropewalk:a,ropewalk:b", "--ours", FAKE, "--runs", "2"]
    load = ["--profile", "closed:2,sync", "--out", str(tmp_path / "out")]
    assert main([*REQUIRED, *options, *SMALL, *load]) == 0
    captured = capsys.readouterr()
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (list(result["arms"]), result["zero"]) == (["ropewalk:a", "ropewalk:b"], "ropewalk:a")
    turns = [(run["block"], run["arm"][-1]) for run in result["runs"]]
    assert turns == [(block, arm) for block in (0, 1) for arm in "ab" for _ in range(2)]
    assert "ropewalk:b" in captured.out
    assert (tmp_path / "out" / "report.html").exists()


def test_a_system_that_does_not_start_is_status_2(capsys, tmp_path):
    command = f"{sys.executable} -c print('broken',{{port}})"
    options = ["--systems", "ropewalk:a", "--ours", command, "--out", str(tmp_path)]
    assert main([*REQUIRED, *options, *SMALL]) == 2
    assert "ended at its start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--systems", "vllm:x"], "is not ropewalk:DTYPE"),
        (["--prompt-form", "ids"], "text prompts only"),
    ],
)
def test_wrong_options(capsys, options, reason):
    with pytest.raises(SystemExit):
        main([*REQUIRED, *options])
    assert reason in capsys.readouterr().err


def test_a_sweep_is_refused(capsys, tmp_path):
    options = ["--systems", "ropewalk:a", "--ours", FAKE, "--out", str(tmp_path)]
    assert main([*REQUIRED, *options, *SMALL, "--profile", "sweep"]) == 2
    assert "name them: --profile poisson:2" in capsys.readouterr().err
