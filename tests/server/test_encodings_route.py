"""The list of encodings, over HTTP and as a command."""

import json
import re
from itertools import chain

import pytest
import torch

from ropewalk.cache.types import Op
from ropewalk.model import dry_run
from ropewalk.model.catalogue import LENGTHS, Place
from ropewalk.model.encodings.base import names
from ropewalk.model.kernels.backends import all_backends
from ropewalk.server import hardware
from ropewalk.server.cli import main
from ropewalk.server.studies import encodings as encodings_command
from ropewalk.server.studies.encodings import lines
from tests.server.test_cli import sentence
from tests.server.toy import ask, toy, toy_app

PLACE = Place(all_backends("no compiler here"), torch.bfloat16, torch.device("cpu"))


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr(encodings_command, "this_machine", lambda: PLACE)


def served(*encodings):
    models = [toy(f"m{i}", encoding=name) for i, name in enumerate(encodings)]
    return toy_app(served=models, place=PLACE)


def listed(app):
    response = ask(app, "GET", "/v1/encodings")
    assert response.status_code == 200
    return response.json()


def test_route_lists_all_with_the_models_that_have_them(outside) -> None:
    app = served("rope", outside, "rope")
    body = listed(app)
    assert body["object"] == "list"
    assert (body["device"], body["dtype"]) == ("cpu", "bfloat16")
    assert body["work_of"] == {
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_dim": 64,
        "hidden_size": 768,
    }
    assert [entry["name"] for entry in body["data"]] == [*names(), outside]
    models = {entry["name"]: entry["models"] for entry in body["data"]}
    assert (models["rope"], models[outside], models["t5"]) == (["m0", "m2"], ["m1"], [])
    (rope,) = (entry for entry in body["data"] if entry["name"] == "rope")
    assert rope["hooks"] == ["query_scales", "rotate", "rotation", "for_layer"]
    assert rope["backends"][1]["reason"] == "no compiler here"
    assert [work["keys"] for work in rope["work"]] == list(LENGTHS)
    assert listed(app) == body


def test_list_is_made_once(monkeypatch) -> None:
    app = served("rope")
    body = listed(app)
    monkeypatch.setattr("ropewalk.server.app.operations.catalogue", None)
    assert listed(app) == body


def test_without_a_place_there_is_no_such_route() -> None:
    assert ask(toy_app(), "GET", "/v1/encodings").status_code == 404


def test_command_prints_each_with_its_facts(place, outside, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main.main(["encodings", "--encoding", outside]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    blocks = {block.splitlines()[0]: block for block in said.out.split("\n\n")}
    assert list(blocks)[:-1] == [*names(), outside]
    assert "Comes from a file of the user's." in blocks[outside]
    assert "none at 512 to 32,768 keys" in blocks["nope"]
    assert "hard limit      the trained positions" in blocks["learned"]
    reasons = "not triton: the device is cpu; not cpu: no compiler here"
    assert f"sdpa, reference; {reasons}" in " ".join(blocks["alibi"].split())
    assert "1,179,648 FLOPs, 48 bytes at 4,096 keys" in blocks["alibi"]
    assert "base: pair i rotates by" in blocks["rope"]
    assert "(cpu, bfloat16)" in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_command_fits_a_narrow_terminal() -> None:
    from ropewalk.model.catalogue import facts

    for name in names():
        assert max(map(len, lines(facts(name, PLACE), 60))) <= 60


def test_command_prints_json_that_the_route_answers_too(place, capsys) -> None:
    assert main.main(["encodings", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    answered = listed(served("rope"))
    for entry in answered["data"]:
        del entry["models"]
    assert told == answered


def test_command_prints_what_can_be_done_to_a_cache(place, outside, capsys, monkeypatch) -> None:
    monkeypatch.setattr(dry_run, "MEASURED", 2)
    monkeypatch.setenv("COLUMNS", "100")
    assert main.main(["encodings", "--operations", "--encoding", outside]) == 0
    said = capsys.readouterr().out
    table, reasons, note = said.split("\n\n")
    heading, *rows = table.splitlines()
    assert heading.split() == [op.value for op in Op]
    capabilities = {re.split(r"  +", row)[0]: re.split(r"  +", row)[1:] for row in rows[::2]}
    rope = ["rope, absolute", "rope, raw", "rope, block"]
    rows_of = [rope if name == "rope" else [name] for name in [*names(), outside]]
    assert list(capabilities) == [*chain.from_iterable(rows_of)]
    assert capabilities["rope, absolute"] == ["free"] * 4 + ["approximate"] * 2
    assert capabilities["learned"] == ["free"] * 4 + ["impossible"] * 2
    costs = dict(zip(capabilities, rows[1::2], strict=True))
    assert re.fullmatch(r" +(0 \([\d.]+ (µs|ms)\) *){4}- +-", costs["learned"])
    assert re.fullmatch(
        r" +(0 \([\d.]+ (µs|ms)\) *){4}([\d.]+ (µs|ms|s) *){2}", costs["rope, absolute"]
    )
    assert "learned: impossible, because the position is part of every stored key" in reasons
    assert "(cpu, bfloat16)" in note and "1,000 tokens" in note
    assert max(map(len, said.splitlines())) <= 100


def test_command_prints_what_operations_cost_as_json(place, capsys, monkeypatch) -> None:
    monkeypatch.setattr(dry_run, "MEASURED", 2)
    assert main.main(["encodings", "--operations", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    for entry, answered in zip(told["data"], listed(served("rope"))["data"], strict=True):
        for cell, plain in zip(entry["operations"], answered["operations"], strict=True):
            assert (cell.pop("seconds_per_1000_tokens", None) is None) == (
                plain["capability"] == "impossible"
            )
            cell.pop("bytes_per_1000_tokens", None)
            assert cell == plain


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0000123, "12 µs"),
        (0.00123, "1.2 ms"),
        (0.0523, "52 ms"),
        (0.9996, "1000 ms"),
        (3, "3.0 s"),
    ],
)
def test_durations(seconds, said) -> None:
    assert encodings_command.duration(seconds) == said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--encoding", "ropes"], 1, "There is no encoding 'ropes'; use one of alibi"),
        (["--encoding", "no.such:Thing"], 1, "is its folder in PYTHONPATH?"),
        (["--jsn"], 2, "Did you mean '--json'?"),
    ],
)
def test_refusals_are_one_sentence(place, arguments, code, words, capsys) -> None:
    assert main.main(["encodings", *arguments]) == code
    assert words in sentence(capsys)


def test_this_machine_is_described_without_a_compiler(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    monkeypatch.setattr(hardware.torch.cuda, "is_available", lambda: False)
    found = encodings_command.this_machine()
    assert found.device.type == "cpu"
    assert "cannot be run" in found.backends[1].kernels
