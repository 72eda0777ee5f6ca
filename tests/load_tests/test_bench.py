import json
import socket

import pytest

from load_tests.bench import main
from tests.load_tests.sse_server import good, serving, whole

SMALL = ["--prompt-tokens", "4", "--output-tokens", "3", "--prefill-tokens", "8"]
SMALL += ["--prefix-tokens", "4", "--runs", "2", "--concurrency", "1,2"]


def bench(capsys, *options: str, answer=good):
    with serving(answer) as running:
        status = main(["--base-url", f"http://127.0.0.1:{running.port}", *SMALL, *options])
    captured = capsys.readouterr()
    return status, captured, running


def test_all_workloads_a_table_and_the_json_line_last(capsys, tmp_path):
    status, captured, running = bench(capsys, "--json", str(tmp_path / "r.json"))
    *text, last = captured.out.strip().split("\n")
    result = json.loads(last)
    labels = ["stream", "prefill", "closed c=1", "closed c=2", "shared-prefix"]
    assert status == 0
    assert [cell["label"] for cell in result["cells"]] == labels
    assert [len(cell["runs"]) for cell in result["cells"]] == [2] * 5
    assert all(any(line.startswith(label) for line in text) for label in labels)
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert result["arguments"]["model"] == "tiny"
    assert "closed c=2, run 2 of 2" in captured.err
    prompts = [str(body["prompt"]) for body in running.bodies]
    assert len(set(prompts)) == len(prompts)
    assert all(body["ignore_eos"] and body["model"] == "tiny" for body in running.bodies)
    # ids stay inside the vocabulary that /v1/models tells
    assert max(max(body["prompt"]) for body in running.bodies) < 1000


def test_options_reach_the_wire(capsys):
    options = ("--model", "other", "--no-ignore-eos", "--prompt-form", "text", "--api-key", "k")
    status, _, running = bench(capsys, "--workload", "stream", *options)
    assert status == 0
    body = running.bodies[-1]
    assert body["model"] == "other"
    assert "ignore_eos" not in body
    assert len(body["prompt"].split()) == 4
    assert "Bearer k" in running.heads[-1]


def test_the_key_is_not_in_the_result(capsys):
    _, captured, _ = bench(capsys, "--workload", "stream", "--api-key", "sesame")
    assert "sesame" not in captured.out


def test_the_same_seed_sends_the_same_prompts(capsys):
    runs = [bench(capsys, "--workload", "closed", "--seed", seed)[2].bodies for seed in "aab"]
    sent = [sorted(str(body["prompt"]) for body in bodies) for bodies in runs]
    assert sent[0] == sent[1] != sent[2]


def test_poisson_can_be_asked_for(capsys):
    options = ("--workload", "poisson", "--rate", "200", "--arrivals", "4")
    status, captured, _ = bench(capsys, *options)
    assert status == 0
    assert "poisson 200/s" in captured.out


def test_some_failures_are_status_1_and_shown(capsys):
    count = 0

    def sometimes(path, body):
        nonlocal count
        count += path == "/v1/completions"
        return whole("500 No", {"error": "oh"}) if count == 5 else good(path, body)

    status, captured, _ = bench(capsys, "--workload", "closed", answer=sometimes)
    assert status == 1
    assert "! closed c=1: 1 failed: status 500" in captured.out


def test_nobody_there_is_status_2_and_one_sentence(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        status = main(["--base-url", f"http://127.0.0.1:{taken.getsockname()[1]}"])
    error = capsys.readouterr().err
    assert status == 2
    assert "cannot connect" in error
    assert error.count("\n") == 1


def test_a_wrong_model_names_the_right_ones(capsys):
    status, captured, _ = bench(capsys, "--model", "nope")
    assert status == 2
    assert "--model takes one of: tiny, other" in captured.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--base-url", "https://x"], "is not a base URL"),
        (["--runs", "0"], "not a number from 1 up"),
        (["--concurrency", "1,x"], "invalid"),
        (["--rate", "0"], "not a number above 0"),
        (["--dialect", "transformers", "--prompt-form", "ids"], "text prompts only"),
        (["--workload", "nap"], "invalid choice"),
    ],
)
def test_wrong_options_are_refused_by_name(capsys, options, reason):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for word in ("shared-prefix", "examples:", "Exit status", "ROPEWALK", "--no-ignore-eos"):
        assert word.lower() in text.lower()
