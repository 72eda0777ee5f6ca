"""The commands of README.md and docs/serving.md: each is run, or would be understood."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from ropewalk.server.download import SMOLLM2, stored
from tests.command_line import understood

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = README + (ROOT / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Shell commands, one string each; a command ends where its quotes and backslashes do."""
    found: list[str] = []
    open_command = ""
    for line in "".join(blocks("bash")).splitlines():
        open_command += line + "\n"
        try:
            shlex.split(open_command)
        except ValueError:  # an open quote
            continue
        if not line.endswith("\\"):
            found.append(open_command.strip())
            open_command = ""
    assert not open_command
    return found


CURLS = [command for command in commands() if command.startswith("curl ")]
OTHERS = [command for command in commands() if not command.startswith("curl ")]


def options_of(words: list[str]) -> None:
    """Fails when `ropewalk` would not understand the words."""
    if words[0] == "bench":
        from ropewalk.load_tests.run import bench

        assert bench.parser().parse_args(words[1:])
    else:
        assert understood(*words)


@pytest.mark.parametrize("command", dict.fromkeys(OTHERS))
def test_command_is_one_that_would_be_understood(command: str) -> None:
    words = shlex.split(command)
    program = words[0]
    if program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
    elif program == ".venv/bin/ropewalk":
        options_of(words[1:])
    elif words[:2] == ["docker", "build"]:
        recipe = (ROOT / "Dockerfile").read_text()
        for before, word in pairwise(words):
            if before == "--build-arg":
                assert f"ARG {word.split('=')[0]}" in recipe
                assert word in recipe
    elif words[:2] == ["docker", "run"]:
        recipe = (ROOT / "Dockerfile").read_text()
        image = next(i for i, word in enumerate(words) if word in ("ropewalk", "ropewalk-cuda"))
        assert f"-t {words[image]} " in PAGES
        if words[image + 1 :]:
            options_of(words[image + 1 :])
        volume = words[words.index("-v") + 1].split(":")[1]
        assert f"VOLUME {volume}" in recipe
        assert f"EXPOSE {words[words.index('-p') + 1].split(':')[1]}" in recipe
    else:
        pytest.fail(f"no check for {program}")


def test_scripts_are_valid_shell() -> None:
    for script in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)
        if script.name != "bootstrap":
            assert os.access(script, os.X_OK)


def test_readme_is_short() -> None:
    assert len(README.split()) <= 900


# ---- against a running server with the default model ----


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory):
    """`ropewalk serve` as the README starts it."""
    if stored(SMOLLM2, "smollm2") is None:
        pytest.skip("the default model is not here; ropewalk pull smollm2 brings it")
    with serving([], tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory):
    """Models that come and go, as docs/serving.md starts them; base is a bundled one."""
    words = ["base=ropewalk-rope", "--max-models", "1", "--models-autoload"]
    with serving(words, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@contextmanager
def serving(words: list[str], log: Path) -> Iterator[str]:
    """The address of `ropewalk serve` with these words, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ropewalk", "serve", *words, "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        health = [sys.executable, "-m", "ropewalk", "health", "--ready", "--port", str(port)]
        deadline = time.monotonic() + 240
        while "curl" not in log.read_text():  # the banner
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        subprocess.run(health, cwd=ROOT, capture_output=True, check=True)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(40) == 0, log.read_text()


@pytest.mark.smollm2
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", dict.fromkeys(CURLS))
def test_curl_line_is_answered(command: str, request: pytest.FixtureRequest) -> None:
    assert ADDRESS in command
    address = request.getfixturevalue("changing" if "/v1/models/" in command else "address")
    line = command.replace(ADDRESS, address).replace("curl ", "curl --silent --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    if "/metrics" in command:
        assert "ropewalk_cache_info{" in done.stdout
        assert 'model_name="smollm2"' in done.stdout
    elif '"stream": true' in command:
        assert done.stdout.rstrip().endswith("data: [DONE]")
        assert '"completion_tokens"' in done.stdout
    elif '"tools"' in command:
        (choice,) = json.loads(done.stdout)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather"
        assert set(json.loads(call["function"]["arguments"])) >= {"city"}
    elif "json_schema" in command:
        answer = json.loads(done.stdout)["choices"][0]
        assert answer["finish_reason"] == "stop"
        sailor = json.loads(answer["message"]["content"])
        assert sailor.keys() == {"name", "age"} and sailor["age"] <= 99
    elif "France" in command:
        assert "Paris" in done.stdout
    else:
        assert done.stdout.startswith("{")


@pytest.mark.smollm2
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", [each for each in blocks("python") if ADDRESS in each])
def test_python_example_runs(program: str, address: str) -> None:
    command = [sys.executable, "-c", program.replace(ADDRESS, address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.smollm2
@pytest.mark.timeout(300)
def test_chat_streams_from_the_running_server(address: str) -> None:
    port = address.rsplit(":", 1)[1]
    question = next(shlex.split(line)[-1] for line in OTHERS if "chat --stats" in line)
    command = [sys.executable, "-m", "ropewalk", "chat", "--stats", question]
    variables = {**os.environ, "ROPEWALK_PORT": port, "ROPEWALK_CHAT_MAX_TOKENS": "12"}
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=variables, timeout=60, **quiet)
    assert done.returncode == 0, done.stderr
    answer, stats = done.stdout.rsplit("\n(", 1)
    assert len(answer.split()) > 5
    assert "first after" in stats
