"""`ropewalk family`: what its commands print and refuse. The work itself: tests/model/family."""

import subprocess

import pytest

from model.family import fetch
from model.family.sources import SOURCES
from server import cli, family_command
from tests.model.family.test_prepare import small  # noqa: F401 - a fixture
from tests.server.test_cli import sentence


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_family_alone_names_its_commands(capsys) -> None:
    assert cli.main(["family"]) == 2
    assert "ropewalk family --help" in sentence(capsys)


def test_help_says_what_prepare_does(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["family", "prepare", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ropewalk family prepare [FLAGS]")
    assert "--own-tokenizer" in printed and "corpus.npz" in printed


def test_prepare_prints_the_data_card(capsys, monkeypatch, own_home, small) -> None:  # noqa: F811
    sources, shelf = small
    made = family_command.prepare_texts

    def on_a_few(folder, download, bars, *, given_tokenizer):
        assert given_tokenizer is None  # asked for one of its own
        return made(folder, shelf, bars, sources=sources, pieces=360)

    monkeypatch.setattr(family_command, "prepare_texts", on_a_few)
    assert cli.main(["family", "prepare", "--own-tokenizer"]) == 0
    printed = capsys.readouterr()
    assert printed.out == (own_home / "family" / "data_card.md").read_text()
    assert "reading texts" in printed.err
    assert printed.err.endswith(f"{own_home / 'family' / 'corpus.npz'}\n")


def test_a_missing_client_is_one_sentence(capsys, monkeypatch) -> None:
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    assert cli.main(["family", "prepare"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("ropewalk: apt-get is missing and fetches r-cran-janeaustenr; install")
    assert SOURCES[0].file in said


def test_a_client_that_fails_is_quoted(capsys, monkeypatch) -> None:
    def fail(arguments, **_):
        return subprocess.CompletedProcess(arguments, 100, "one\nE: no such package\n")

    monkeypatch.setattr(fetch.shutil, "which", lambda name: name)
    monkeypatch.setattr(fetch.subprocess, "run", fail)
    assert cli.main(["family", "prepare"]) == 1
    assert "1.0.0-1 (E: no such package); check" in capsys.readouterr().err
