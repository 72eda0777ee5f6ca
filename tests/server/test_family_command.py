"""`ropewalk family`: what its commands print and refuse. The work itself: tests/model/family."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ropewalk.model.family.files import alone
from ropewalk.model.family.texts import corpus, fetch
from ropewalk.model.family.texts.corpus import Corpus, Split
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.family.texts.sources import SOURCES
from ropewalk.model.family.training import checkpoints
from ropewalk.model.weights.safetensors_dir import SafetensorsDirectory
from ropewalk.server import download as pull
from ropewalk.server.cli import main
from ropewalk.server.launch.build import load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.studies import family as family_command
from tests.model.family.test_prepare import small  # noqa: F401 - a fixture
from tests.server.fake_engine import configured, load_one
from tests.server.test_cli import sentence

PAGE = (Path(__file__).parents[2] / "docs" / "family.md").read_text()


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "kernels").symlink_to(pull.home() / "kernels")  # not compiled once more
    monkeypatch.setenv("ROPEWALK_HOME", str(home))
    return home


def test_family_alone_names_its_commands(capsys) -> None:
    assert main.main(["family"]) == 2
    assert "ropewalk family --help" in sentence(capsys)


def test_prepare_prints_the_data_card(capsys, monkeypatch, own_home, small) -> None:  # noqa: F811
    sources, shelf = small
    made = family_command.prepare_texts

    def on_a_few(folder, download, bars, *, given_tokenizer):
        assert given_tokenizer is None  # asked for one of its own
        return made(folder, shelf, bars, sources=sources, pieces=360)

    monkeypatch.setattr(family_command, "prepare_texts", on_a_few)
    assert main.main(["family", "prepare", "--own-tokenizer"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (own_home / "family" / "data_card.md").read_text()
    assert "reading texts" in printed.err
    assert printed.err.endswith(f"{own_home / 'family' / 'corpus.npz'}\n")


def test_a_missing_client_is_one_sentence(capsys, monkeypatch) -> None:
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    assert main.main(["family", "prepare"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("ropewalk: apt-get is missing and fetches r-cran-janeaustenr; install")
    assert SOURCES[0].file in said


def test_a_client_that_fails_is_quoted(capsys, monkeypatch) -> None:
    def fail(arguments, **_):
        return subprocess.CompletedProcess(arguments, 100, "one\nE: no such package\n")

    monkeypatch.setattr(fetch.shutil, "which", lambda name: name)
    monkeypatch.setattr(fetch.subprocess, "run", fail)
    assert main.main(["family", "prepare"]) == 1
    assert "1.0.0-1 (E: no such package); check" in capsys.readouterr().err


@pytest.fixture
def corpus_there(own_home, monkeypatch):
    for where in (
        "ropewalk.model.family.training.recipe.CONTEXT",
        "ropewalk.server.studies.family.CONTEXT",
    ):
        monkeypatch.setattr(where, 64)  # 512 tokens in a step
    folder = own_home / "family"
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    split = Split.of([("made/0", drawn.integers(300, 340, 1200).tolist())])
    tokenizer = SHIPPED_TOKENIZER.read_bytes()
    corpus.save(Corpus(split, split, "made up", tokenizer), folder / "corpus.npz")


def test_an_encoding_of_ones_own_is_trained_and_served(
    capsys, monkeypatch, own_home, tmp_path, corpus_there
) -> None:
    (tmp_path / "kerple.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.S)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    train = ["family", "train", "--encoding", "kerple:Kerple", "--tokens", "1024", "--no-compile"]
    assert main.main(train) == 0
    run = own_home / "family" / "runs" / "ropewalk-kerple"
    folder = run / "model"
    assert capsys.readouterr().out == f"{folder}\n"
    state = checkpoints.load(run / "checkpoint.safetensors")
    assert state.facts["recipe"]["growing"] == 512  # half, as there are too few for the default
    trusted = ["--trust-encoding", "kerple:Kerple"]
    loaded = load_one(folder, *trusted, "--dtype", "float32", "--kv-memory", "4M")
    assert loaded.served.encoding == "kerple:Kerple"
    learned = SafetensorsDirectory(folder).read("encoding.logs")
    assert learned.all()  # both moved away from 0
    sys.modules.pop("kerple")


def test_training_needs_the_corpus(capsys, own_home) -> None:
    assert main.main(["family", "train"]) == 1
    assert "run ropewalk family prepare" in sentence(capsys)


def test_an_encoding_nobody_knows_is_said_before_another_is_trained(
    capsys, corpus_there, own_home
) -> None:
    encodings = ["--encoding", "rope", "--encoding", "kerpel"]
    assert main.main(["family", "train", "--no-compile", *encodings]) == 1
    assert "kerpel" in sentence(capsys)
    assert not (own_home / "family" / "runs").exists()


def test_without_a_compiler_the_way_out_is_named(capsys, monkeypatch, corpus_there) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main.main(["family", "train", "--device", "cpu"]) == 1
    assert "no C++ compiler 'no-such-compiler'; install g++, set CXX" in sentence(capsys)


def test_two_encodings_of_one_name_are_refused(capsys, corpus_there) -> None:
    encodings = ["--encoding", "a:Own", "--encoding", "b:Own", "--no-compile"]
    assert main.main(["family", "train", *encodings]) == 1
    assert "--encoding a:Own: ropewalk-own is given more than once" in sentence(capsys)


def test_one_training_at_a_time_works_in_a_run(capsys, corpus_there, own_home) -> None:
    run = own_home / "family" / "runs" / "ropewalk-rope"
    with alone(run):
        train = ["family", "train", "--encoding", "rope", "--tokens", "512", "--no-compile"]
        assert main.main(train) == 1
    assert f"another process is using {run}; wait" in sentence(capsys)
    with alone(own_home / "family"):
        assert main.main(["family", "prepare"]) == 1
    assert "another process is using" in sentence(capsys)


def test_notes_that_cannot_be_read_are_named(capsys, corpus_there, own_home, tmp_path) -> None:
    result = own_home / "family" / "evaluation.json"
    shutil.copyfile(pull.FAMILY.parent / "evaluation.json", result)
    (tmp_path / "notes.md").write_bytes(b"\xff\xfe")
    for name in ("missing.md", "notes.md"):
        assert main.main(["family", "report", "--notes", str(tmp_path / name)]) == 1
        assert f"the notes {tmp_path / name} cannot be read" in sentence(capsys)


@pytest.mark.parametrize("flags", [("--tokens", "0"), ("--seed", "-1"), ("--threads", "x")])
def test_numbers_that_cannot_be_are_named(capsys, flags) -> None:
    assert main.main(["family", "train", *flags]) == 2
    assert flags[0] in (said := sentence(capsys)) and flags[1] in said


def test_what_cannot_be_written_or_read_is_one_sentence(
    capsys, monkeypatch, tmp_path, own_home, corpus_there
) -> None:
    monkeypatch.setattr(pull, "FAMILY", tmp_path / "weights")
    train = ["family", "train", "--encoding", "rope", "--tokens", "512", "--no-compile"]
    runs = own_home / "family" / "runs"
    runs.write_text("a file where a folder should be")
    assert main.main(train) == 1
    assert str(runs) in sentence(capsys)
    runs.unlink()
    assert main.main(train) == 0
    capsys.readouterr()
    (runs / "ropewalk-rope" / "model" / "config.json").write_text("{")
    for command in ("pack", "evaluate"):
        assert main.main(["family", command]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("ropewalk: ") and "config.json" in said


def test_packed_models_are_served_by_name(capsys, monkeypatch, tmp_path, corpus_there) -> None:
    monkeypatch.setattr(pull, "FAMILY", tmp_path / "weights")
    assert main.main(["serve", "family"]) == 1
    assert "ropewalk family prepare, train and pack" in sentence(capsys)
    assert main.main(["family", "pack"]) == 1
    assert "run ropewalk family train" in sentence(capsys)
    for encoding in ("rope", "learned"):
        flags = ["--encoding", encoding, "--tokens", "512", "--no-compile"]
        assert main.main(["family", "train", *flags]) == 0
    capsys.readouterr()
    assert main.main(["family", "pack"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["ropewalk-learned", "ropewalk-rope"]
    assert all(abs(float(line.split()[3])) < 0.01 for line in table[1:])
    loaded = load_models(configured("family", "--kv-memory", "8M"), Metrics())
    served = {model.served.name: model.served.encoding for model in loaded}
    assert served == {"ropewalk-learned": "learned", "ropewalk-rope": "rope"}
