"""The command: what reaches which function, exit codes, and one sentence when it gives up."""

import logging
import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest

from ropewalk.server import download, launch
from ropewalk.server.cli import conversation
from ropewalk.server.cli import main as cli
from ropewalk.server.cli.options import settings_of
from ropewalk.server.cli.serve import wait_briefly
from ropewalk.server.config import ModelSource
from ropewalk.server.errors import CommandError
from tests.server.fake_server import events, serving
from tests.server.sockets import free_port

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("no_options")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list:
    """The configurations that `serve` hands over, instead of servers."""
    configs: list = []

    def run(config, listener, tls, traces) -> int:
        configs.append(config)
        return 0

    module = types.ModuleType("ropewalk.server.launch.build")
    module.run = run
    monkeypatch.setitem(sys.modules, "ropewalk.server.launch.build", module)
    monkeypatch.setattr(launch, "build", module, raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    return configs


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error: one line."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ropewalk: ")
    assert said.err.count("\n") == 1
    return said.err


def run(*arguments: str, piped: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ropewalk", *arguments]
    variables = {"PATH": os.environ["PATH"], **environ}
    captured = {"capture_output": True, "text": True, "input": piped}
    return subprocess.run(command, cwd=ROOT, env=variables, timeout=60, check=False, **captured)


def test_serve_hands_the_configuration_over(built, monkeypatch) -> None:
    monkeypatch.setenv("ROPEWALK_MAX_QUEUE", "5")
    port = free_port()
    assert cli.main(["serve", "tiny=x.gguf", "--port", str(port)]) == 0
    assert built[0].models == (ModelSource("tiny", "x.gguf"),)
    assert (built[0].port, built[0].limits.max_queue) == (port, 5)


def test_exit_code_of_the_server_is_the_commands(built, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["ropewalk.server.launch.build"], "run", lambda *_: 1)
    assert cli.main(["serve", "--port", str(free_port())]) == 1


def test_taken_port_is_said_before_anything_is_loaded(built, capsys) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 1
    assert f"cannot listen on http://127.0.0.1:{port}: another program is using" in sentence(capsys)
    assert built == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "No such command 'serv'. Did you mean 'serve'? See ropewalk --help"),
        (["audti"], "No such command 'audti'. Did you mean 'audit'? See ropewalk --help"),
        (["serve", "--prt", "1"], "'--prt'. Did you mean '--port'? See ropewalk serve --help"),
        (
            ["serve", "--por", "1"],
            "'--por'. (Did you mean one of: '--explorer', '--port'?); see ropewa",
        ),
        (["serve", "--max-modellen=4k"], "'--max-model-len', '--max-models'?); see ropewalk serve"),
        (["serve", "--no-prefix-sharin"], "Did you mean one of: '--no-prefix-sharing', "),
        (["serve", "--gpu-memory-utilization", "1"], "--gpu-memory-utilization'; see ropewalk se"),
        (["chat", "--modle", "x"], "'--modle'. Did you mean '--model'? See ropewalk chat --help"),
        (["audit", "--step", "3"], "'--steps', '--steps-table'?); see ropewalk audit --help"),
        (["family", "train", "--token", "3"], "mean '--tokens'? See ropewalk family train --help"),
        (["--verison"], "'--verison'. Did you mean '--version'? See ropewalk --help"),
        (["serve", "-p", "1"], "No such option '-p'; see ropewalk serve --help"),
        (["completion", "csh"], "SHELL: 'csh' is not one of 'bash', 'zsh', 'fish'"),
        (["serve", "--port"], "Option '--port' requires an argument"),
        (["serve", "--port", "x"], "--port: 'x' is not a whole number"),
        (["chat", "--seed", "-1.5"], "--seed: '-1.5' is not a whole number"),
        (["pull", "a", "b"], "unexpected extra argument (b); see ropewalk pull --help"),
    ],
)
def test_usage_errors_exit_with_2(arguments, words, capsys, built) -> None:
    assert cli.main(arguments) == 2
    assert words in sentence(capsys)
    assert built == []


def test_misspelt_variable_exits_with_2(capsys, monkeypatch, built) -> None:
    monkeypatch.setenv("ROPEWALK_MAX_SEQ", "3")
    assert cli.main(["serve"]) == 2
    assert "ROPEWALK_MAX_SEQ is not known to ropewalk; did you mean ROPEWALK_" in sentence(capsys)


def test_key_of_a_client_does_not_leave_the_server_open(built, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ROPEWALK_API_KEY", "secret")
    assert cli.main(["serve", "--port", str(free_port())]) == 2
    assert "set ROPEWALK_API_KEYS to require a key" in sentence(capsys)
    assert built == []
    monkeypatch.setenv("ROPEWALK_API_KEYS", "secret")
    assert cli.main(["serve", "--port", str(free_port())]) == 0
    assert built[0].http.api_keys == {"secret"}


def test_failures_exit_with_1_and_interrupts_with_130(capsys, monkeypatch) -> None:
    def fail(source: str) -> Path:
        raise CommandError("no; do that")

    def interrupt(source: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "pull", fail)
    assert cli.main(["pull"]) == 1
    assert sentence(capsys) == "ropewalk: no; do that\n"
    monkeypatch.setattr(download, "pull", interrupt)
    assert cli.main(["pull"]) == 130


def test_pull_prints_the_path_alone(capsys, monkeypatch) -> None:
    monkeypatch.setattr(download, "pull", lambda source: Path("/models") / source)
    assert cli.main(["pull"]) == 0
    assert cli.main(["pull", "owner/name"]) == 0
    assert capsys.readouterr().out == "/models/smollm2\n/models/owner/name\n"


def test_chat_reads_its_options(monkeypatch, capsys) -> None:
    calls = []

    def ask(options, question, out) -> int:
        calls.append((options, question))
        return 0

    def converse(options, lines, out, *, greet) -> int:
        calls.append((options, None))
        assert not greet  # standard input is no terminal
        return 0

    monkeypatch.setattr(conversation, "ask", ask)
    monkeypatch.setattr(conversation, "converse", converse)
    monkeypatch.setenv("ROPEWALK_PORT", "9000")
    monkeypatch.setenv("ROPEWALK_HOST", "0.0.0.0")
    monkeypatch.setenv("ROPEWALK_API_KEY", "secret")
    assert cli.main(["chat", "why?", "--temperature", "0", "--stats"]) == 0
    assert cli.main(["chat", "--url", "http://there"]) == 0
    (first, question), (second, nothing) = calls
    assert (question, nothing) == ("why?", None)
    assert first.server.url == "http://127.0.0.1:9000"
    assert first.sampling == {"temperature": 0.0}
    assert first.stats and not second.stats
    assert second.server.url == "http://there"
    assert (first.api_key, "secret" in repr(first)) == ("secret", False)


def test_a_question_takes_the_text_that_is_piped_in() -> None:
    def answer(path, body):
        return 200, events({"choices": [{"delta": {"content": "Yes."}}]})

    with serving(answer) as seen:
        for piped, asked in ((" a report\n", "Well?\n\na report"), ("", "Well?")):
            arguments = ["chat", "Well?", "--url", seen.url, "--model", "m"]
            assert run(*arguments, piped=piped).stdout == "Yes.\n"
            assert seen.bodies[-1]["messages"][-1]["content"] == asked
        command = [sys.executable, "-m", "ropewalk", *arguments]
        subprocess.run(command, cwd=ROOT, input=b"caf\xe9", check=True, timeout=60)
        assert seen.bodies[-1]["messages"][-1]["content"] == "Well?\n\ncaf\ufffd"


def test_a_terminal_that_lacks_a_letter_gets_a_question_mark() -> None:
    def answer(path, body):
        return 200, events({"choices": [{"delta": {"content": "caf\u00e9\u00a0\u6771"}}]})

    with serving(answer) as seen:
        arguments = ["chat", "?", "--url", seen.url, "--model", "m"]
        assert run(*arguments, PYTHONIOENCODING="ascii").stdout == "caf???\n"
        assert run(*arguments, PYTHONIOENCODING="utf-8").stdout == "caf\u00e9\u00a0\u6771\n"


@pytest.mark.parametrize("status", [200, 503])
def test_health_asks_where_the_server_listens(status, capsys, monkeypatch) -> None:
    with serving(lambda path, body: (status, b"")) as seen:
        monkeypatch.setenv("ROPEWALK_HOST", "0.0.0.0")
        monkeypatch.setenv("ROPEWALK_PORT", str(seen.port))
        code = cli.main(["health"])
        ready = cli.main(["health", "--ready"])
    assert seen.paths == ["/health/live", "/health/ready"]
    assert (code, ready) == ((0, 0) if status == 200 else (1, 1))
    assert f"answered {status}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run.bench", ["--help", "--port", "x"]),
        ("run.bench", ["compare", "a", "--", "-b", "--fail-on=x"]),
        ("micro.profile_step", ["--out", "x", "--profile-step"]),
    ],
)
def test_bench_gets_its_arguments_untouched(name, arguments, monkeypatch) -> None:
    seen = []

    def main(arguments) -> int:
        seen.append(list(arguments))
        return 3

    module = types.ModuleType(f"ropewalk.load_tests.{name}")
    module.main = main
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert cli.main(["bench", *arguments]) == 3
    assert seen == [arguments]


def test_a_socket_file_is_not_left_where_a_server_did_not_start(built, tmp_path) -> None:
    assert cli.main(["serve", "--uds", str(tmp_path / "s")]) == 0
    assert built[0].uds == tmp_path / "s"
    assert list(tmp_path.iterdir()) == []


def test_flags_beat_the_address_in_a_file_or_variable(built, tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'uds = "{tmp_path / "s"}"\nmax-queue = 5\n')
    monkeypatch.setenv("ROPEWALK_CONFIG", str(file))
    monkeypatch.setenv("ROPEWALK_HEALTH_URL", "http://127.0.0.1:1/elsewhere")
    port = free_port()
    assert cli.main(["serve", "--port", str(port)]) == 0
    assert (built[0].uds, built[0].port, built[0].limits.max_queue) == (None, port, 5)
    assert cli.main(["health", "--port", str(port)]) == 1
    assert f"no answer from http://127.0.0.1:{port} " in sentence(capsys)
    assert cli.main(["health", "--uds", str(tmp_path / "other")]) == 1
    assert f"no answer from unix:{tmp_path / 'other'} " in sentence(capsys)
    assert cli.main(["health"]) == 1
    assert "no answer from http://127.0.0.1:1/elsewhere " in sentence(capsys)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(shell, capsys, tmp_path) -> None:
    assert cli.main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True)


def test_bash_completes_commands_and_flags(tmp_path) -> None:
    script, program = tmp_path / "script", tmp_path / "ropewalk"
    script.write_text(run("completion", "bash").stdout)
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m ropewalk "$@"\n')
    program.chmod(0o755)
    complete = f"""
        PATH={tmp_path}:$PATH
        source {script}
        COMP_WORDS=($1) COMP_CWORD=$(( $(wc -w <<< "$1") - 1 ))
        _ropewalk_completion ropewalk
        echo "${{COMPREPLY[@]}}"
    """

    def offered(words: str) -> str:
        command = ["bash", "-c", complete, "bash", words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert offered("ropewalk fam") == "family"
    assert offered("ropewalk serve --max-model-") == "--max-model-len"
    assert offered("ropewalk family tr") == "train"
    assert offered("ropewalk completion f") == "fish"
    assert offered("ropewalk serve --no-prefix") == "--no-prefix-sharing"
    assert offered("ropewalk serve --dtype f") == "float16 float32"


def test_no_command_shows_the_help(capsys) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    for command in ("serve", "chat", "pull", "health", "bench", "version", "Examples:"):
        assert command in said


@pytest.mark.parametrize("command", ["serve", "chat", "health"])
def test_help_names_every_flag_default_and_variable(command, capsys) -> None:
    assert cli.main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = "".join(lines).replace(" ", "")  # words are broken at hyphens, too
    for one in settings_of(cli.ropewalk.get_command(click.Context(cli.ropewalk), command)):
        for flag in (*(one.opts if one.opts != ["models"] else ["MODEL"]), *one.secondary_opts):
            assert flag in said
        meaning = f"{one.help} (default: {one.default_in_words}; {one.envvar})"
        assert meaning.replace(" ", "") in said
    assert max(map(len, lines)) <= 100


def test_version_and_help_answer_without_torch() -> None:
    code = (
        "import sys, ropewalk.server.cli.main as c; c.main(['version']); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second, loaded = done.stdout.splitlines()
    assert first.startswith("ropewalk ")
    assert second.startswith("Python 3.")
    assert loaded == "False"


@pytest.mark.parametrize("told", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_wait_briefly_unless_told_otherwise(told) -> None:
    environ = dict(told)
    wait_briefly(environ)
    assert environ == (told or {"GOMP_SPINCOUNT": "30000"})


def test_as_a_program() -> None:
    wrong = run("serve", "--port", "x")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("ropewalk: --port: 'x' is not")
    named, flagged = run("version"), run("--version", "serve")
    assert (named.returncode, named.stdout) == (0, flagged.stdout)


def test_a_reader_that_has_enough_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "ropewalk", "version"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, stdout=writes, stderr=subprocess.PIPE, cwd=ROOT, text=True, env=buffered
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")
