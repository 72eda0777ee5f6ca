"""The command that watches: what it prints and writes, its exit status, and what it refuses."""

import json
import re

import pytest
import torch

from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.inspect import audit_arms
from ropewalk.model.inspect.audit import Watch
from ropewalk.server.cli import main
from ropewalk.server.studies import audit as audit_command
from tests.model import encoder_decoders
from tests.model.checkpoints import llama, random_model, save
from tests.server.test_cli import sentence

SHORT = ("--prompt-tokens", "6", "--steps", "4")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def checkpoint(here, capsys):
    """A tiny llama's folder."""
    folder = save(random_model(llama()), here / "tiny-llama")
    capsys.readouterr()  # what saving said
    return folder


def audit(capsys, *arguments) -> str:
    assert main.main(["audit", *arguments]) == 0
    return capsys.readouterr().out


def rows(printed: str) -> dict[str, list[str]]:
    """Arm: its numbers, from the table."""
    lines = (re.split(r" {2,}", line) for line in printed.split("\n\n")[0].splitlines())
    return {name: numbers for name, *numbers in lines}


def test_without_a_model_every_encoding_is_shown(capsys) -> None:
    table = rows(audit(capsys, *SHORT))
    columns = ["steps", "written/token", "changed", "should change", "stale"]
    assert table["encoding"] == [*columns, "rotations/token", "bias values/token"]
    assert table["rope"] == ["5", "8", "0", "0", "0", "12", "0"]
    assert table["alibi"] == ["5", "8", "0", "0", "0", "0", "80"]
    assert table["rope:dynamic"][2] == "0" and table["rope:dynamic"][4] == "90"
    assert {"t5", "t5:materialised", "learned", "sinusoidal", "nope"} <= table.keys()


def test_what_the_answers_are_worth_is_said(capsys) -> None:
    printed = audit(capsys, *SHORT, "--encodings", "t5,rope:dynamic", "--trained-length", "7")
    assert (
        "tiny is a small decoder with random weights: it shows mechanics, not quality." in printed
    )
    assert "t5: the encoding's weights are random." in printed
    assert "rope:dynamic: as if trained for 7 tokens" in printed
    assert "Appending changes no cached entry under any encoding" in printed


def test_every_step_can_be_printed(capsys) -> None:
    printed = audit(capsys, *SHORT, "--encodings", "rope,alibi", "--steps-table")
    rope, alibi, sums = printed.split("\n\n")[:3]
    assert rope.splitlines()[0] == "rope" and alibi.splitlines()[0] == "alibi"
    assert [line.split()[0] for line in rope.splitlines()[2:]] == ["6", "7", "8", "9", "10"]
    assert rope.splitlines()[-1].split()[-1] == "9"
    assert alibi.splitlines()[-1].endswith("0 to 9")
    assert sums.startswith("encoding")


def test_files_hold_what_is_printed(here, capsys) -> None:
    flags = ("--encodings", "rope,nope", *SHORT)
    audit(capsys, *flags, "--json", "a.json", "--html", "a.html")
    written = json.loads((here / "a.json").read_text())
    assert json.loads(audit(capsys, *flags, "--json", "-")) == written
    assert [arm["encoding"] for arm in written["arms"]] == ["rope", "nope"]
    assert (here / "a.html").read_text().count("<svg") == 2


def test_a_model_is_shown_with_its_own_encoding_and_the_counter_example(checkpoint, capsys) -> None:
    printed = audit(capsys, str(checkpoint), *SHORT)
    assert list(rows(printed)) == ["encoding", "rope", "rope:dynamic"]
    note = "tiny-llama was trained with rope; the other arms show mechanics, not quality."
    assert note in printed


def test_a_model_takes_a_text_and_all_encodings(checkpoint, capsys) -> None:
    flags = (str(checkpoint), "--prompt", "hello there", "--steps", "2", "--encodings", "all")
    written = json.loads(audit(capsys, *flags, "--json", "-"))
    assert len(written["arms"]) == len(audit_arms.ALL)
    assert all(arm["summary"]["unexpected"] == 0 for arm in written["arms"])
    prompts = {arm["steps"][0]["length"] for arm in written["arms"]}
    assert len(prompts) == 1 and prompts.pop() >= 2


def test_the_tiny_decoder_reads_bytes(capsys) -> None:
    printed = audit(capsys, "--prompt", "höre", "--steps", "1", "--encodings", "nope", "--json=-")
    assert json.loads(printed)["arms"][0]["steps"][0]["length"] == 5


def test_a_corrupted_entry_is_named_and_fails(capsys, monkeypatch) -> None:
    """As a check: exit status 1 when what was stored rightly is something else now."""

    class Corrupting(Watch):
        def step(self, tokens):
            if len(self.known) == 8:
                self.kv.layer(1).keys[0, 2, 1] += 1
            return super().step(tokens)

    monkeypatch.setattr("ropewalk.model.inspect.audit.Watch", Corrupting)
    assert main.main(["audit", *SHORT, "--encodings", "alibi,rope"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"ropewalk: {name}: stored entries changed although they were correct, which no encoding "
        "requires: the key of layer 1, head 1, position 2 at length 9"
        for name in ("alibi", "rope")
    ]
    assert rows(said.out)["rope"][2] == "1"


def test_only_the_first_of_many_are_named(capsys, monkeypatch) -> None:
    class Corrupting(Watch):
        def step(self, tokens):
            if len(self.known) == 8:
                self.kv.layer(0).values[0, :5] += 1
            return super().step(tokens)

    monkeypatch.setattr("ropewalk.model.inspect.audit.Watch", Corrupting)
    assert main.main(["audit", *SHORT, "--encodings", "nope"]) == 1
    assert "; and 7 more entries" in capsys.readouterr().err


class Failing(PositionalEncoding):
    def freeze(self):
        raise RuntimeError("no such table")


class InLayers(PositionalEncoding):
    def for_layer(self, layer):
        raise RuntimeError("no such layer")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--encodings", "ropes"], 1, "There is no encoding 'ropes'"),
        (["--encodings", "rope:fast"], 1, "use one of rope, rope:dynamic, rope:dynamic-re"),
        (["--encodings", ","], 2, "--encodings: the list is empty"),
        (["--encodings", "no.such:Thing"], 1, "is its folder in PYTHONPATH?"),
        (["--encodings", f"{__name__}:Failing"], 1, "Failing cannot be made (test_audit_comm"),
        (["--encodings", f"{__name__}:InLayers"], 1, "InLayers fails (test_audit_command.py, "),
        (["--prompt", ""], 2, "--prompt: the text has no tokens"),
        (["--steps", "0"], 2, "--steps: 0 is outside 1 to 4096"),
        (
            ["--prompt", "a", "--prompt-tokens", "3"],
            2,
            "--prompt and --prompt-tokens exclude each other",
        ),
        (["--html", "there/a.html"], 1, "there is not a directory"),
        (["--json", "there/a.json"], 1, "there is not a directory"),
        (["nosuch"], 1, "nosuch is neither a file nor a directory"),
    ],
)
def test_refusals_are_one_sentence_and_write_nothing(here, arguments, code, words, capsys) -> None:
    assert main.main(["audit", *arguments]) == code
    assert words in sentence(capsys)
    assert not list(here.iterdir())


def test_a_token_that_the_model_does_not_embed_is_refused(checkpoint, capsys) -> None:
    (checkpoint / "added_tokens.json").write_text('{"<a>": 258, "<b>": 259, "<pad>": 260}')
    flags = (str(checkpoint), "--steps", "1", "--encodings", "nope")
    assert main.main(["audit", *flags, "--prompt", "so<b>"]) == 0
    capsys.readouterr()
    assert main.main(["audit", *flags, "--prompt", "so<pad>"]) == 2
    assert "--prompt: the text has a token that tiny-llama does not embed" in sentence(capsys)


def test_an_encoder_decoder_is_refused(here, capsys) -> None:
    folder = save(encoder_decoders.random_model(encoder_decoders.t5()), here / "tiny-t5")
    capsys.readouterr()
    assert main.main(["audit", str(folder)]) == 1
    assert "tiny-t5 is an encoder-decoder, but an audit runs only decoders" in sentence(capsys)


def test_a_file_that_cannot_be_written_is_said(here, capsys) -> None:
    (here / "a.html").mkdir()
    assert main.main(["audit", *SHORT, "--encodings", "nope", "--html", "a.html"]) == 1
    assert "a.html cannot be written (Is a directory)" in sentence(capsys)


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    with audit_command.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
