import json
import sys

import pytest

from load_tests.peers import main

FAKE = f"{sys.executable} -m tests.load_tests.sse_server {{port}}"
REQUIRED = ["--peer-python", sys.executable, "--model", "weights"]
SMALL = ["--prompt-tokens", "4", "--output-tokens", "3", "--requests-per-worker", "1"]


def test_two_systems_take_turns(capsys, tmp_path):
    options = ["--systems", "ropewalk:a,ropewalk:b", "--ours", FAKE, "--runs", "2"]
    load = ["--workload", "closed", "--concurrency", "2", "--json", str(tmp_path / "r.json")]
    assert main([*REQUIRED, *options, *SMALL, *load]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.strip().split("\n")[-1])
    assert [cell["label"] for cell in result["cells"]] == [
        "ropewalk:a closed c=2",
        "ropewalk:b closed c=2",
    ]
    assert [len(cell["runs"]) for cell in result["cells"]] == [2, 2]
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert "ropewalk:a / ropewalk:b" in captured.out
    turns = [line.split(":")[1] for line in captured.err.split("\n") if "starting" in line]
    assert turns == ["a, run 1 of 2", "b, run 1 of 2", "a, run 2 of 2", "b, run 2 of 2"]


def test_a_system_that_does_not_start_is_status_2(capsys):
    command = f"{sys.executable} -c print('broken',{{port}})"
    assert main([*REQUIRED, "--systems", "ropewalk:a", "--ours", command, *SMALL]) == 2
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
