import argparse

import pytest

from ropewalk.load_tests.micro import measured
from ropewalk.load_tests.micro.measured import run, save
from ropewalk.server.errors import CommandError


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    return parser


def test_run_measures_and_then_reports():
    told = []

    def report(found, words, args):
        told.append((found, words, args.size))
        return 1

    assert run("it", options(), ["--size", "3"], lambda args: args.size + 1, report) == 1
    assert told == [(4, ["--size", "3"], 3)]


def test_a_refusal_is_a_sentence(capsys):
    def refuses(args):
        raise CommandError("there is no such thing; take another")

    assert run("it", options(), [], refuses, pytest.fail) == 2
    assert capsys.readouterr().err == "it: there is no such thing; take another\n"


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    name = str(tmp_path / "found")
    save(name, {"first": 1})
    before = (tmp_path / "found.json").read_text()
    with pytest.raises(ValueError):
        save(name, {"second": float("inf")})
    assert (tmp_path / "found.json").read_text() == before

    class Full(type(tmp_path)):
        def replace(self, target):
            raise OSError("cut short here")

    monkeypatch.setattr(measured, "path_of", lambda name, suffix: Full(name + suffix))
    with pytest.raises(OSError, match="cut short"):
        save(name, {"second": 2})
    assert (tmp_path / "found.json").read_text() == before
