"""The command that draws: which file it writes, from which flags, and what it refuses."""

import pytest

from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.server.cli import main
from ropewalk.server.studies import explain as explain_command
from tests.model import encoder_decoders
from tests.model.checkpoints import llama, random_model, save
from tests.server.test_cli import sentence


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explain(capsys, *arguments) -> str:
    """What was printed; nothing else was said."""
    assert main.main(["explain", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_page_is_named_after_the_encoding(here, capsys) -> None:
    assert explain(capsys, "nope") == "nope.html\n"
    page = (here / "nope.html").read_text()
    assert "<h1>nope</h1>" in page and "<dt>touches</dt><dd>nothing</dd>" in page


def test_suffix_chooses_the_format(here, capsys) -> None:
    explain(capsys, "learned", "--out", "pictures.png")
    assert (here / "pictures.png").read_bytes().startswith(b"\x89PNG")


def test_flags_shape_what_is_shown(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(explain_command, "pictures", lambda subject: [])
    flags = ["--heads", "2", "--head-dim", "8", "--context", "1k", "--base", "500"]
    explain(capsys, "rope", *flags, "--option", "width=4", "--option", "layout=interleaved")
    page = (here / "rope.html").read_text()
    assert "2 heads of 8, layer 0, a context of 1,024" in page
    assert "base 500.0, width 4, layout interleaved" in page
    assert "48 FLOPs and 16 bytes read or written" in page  # 2 · 2 heads · 3 · width


def test_an_encoding_from_outside_is_drawn(here, capsys, outside) -> None:
    assert explain(capsys, outside) == "Outside.html\n"
    assert "Comes from a file of the user" in (here / "Outside.html").read_text()


def test_a_model_brings_its_own_settings(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(explain_command, "pictures", lambda subject: [])
    folder = save(random_model(llama()), here / "tiny-llama")
    capsys.readouterr()  # what saving said
    assert explain(capsys, "--model", str(folder), "--out", "a.html") == "a.html\n"
    page = (here / "a.html").read_text()
    assert "<h1>rope in tiny-llama</h1>" in page
    assert f"a context of {llama().max_position_embeddings:,}" in page


def test_a_model_brings_its_trained_biases(here, capsys) -> None:
    folder = save(encoder_decoders.random_model(encoder_decoders.t5()), here / "tiny-t5")
    capsys.readouterr()
    explain(capsys, "--model", str(folder), "--context", "300", "--layer", "0")
    page = (here / "tiny-t5.html").read_text()
    assert page.count("<svg") >= 2  # biases and scores: nothing is made up
    assert "drawn at random" not in page and "random;" not in page
    assert "From distance 113 on" in page


def test_a_limit_of_the_encoding_is_one_of_the_context(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(explain_command, "pictures", lambda subject: [])
    explain(capsys, "learned", "--option", "positions=128", "--context", "1k")
    assert "a context of 128<" in (here / "learned.html").read_text()


class Failing(PositionalEncoding):
    def freeze(self):
        raise RuntimeError("no such table")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "no encoding is given; name one, or a checkpoint with --model"),
        (["ropes"], 1, "There is no encoding 'ropes'"),
        (["no.such:Thing"], 1, "is its folder in PYTHONPATH?"),
        (["rope", "--out", "a.pdf"], 2, "a.pdf ends neither in .html nor in .png"),
        (["rope", "--out", "there/a.png"], 1, "there is not a directory"),
        (["rope", "--heads", "0"], 2, "--heads: 0 is outside 1 to 256"),
        (["rope", "--base", "ten"], 2, "--base: 'ten' is not a number"),
        (["rope", "--option", "width"], 2, "--option: 'width' is not NAME=VALUE"),
        (["rope", "--option", "width=7"], 1, "rope needs an even width"),
        (["rope", "--option", "base=ten"], 1, "rope cannot be made with base='ten'"),
        (["rope", "--option", "scaling=linear"], 1, "rope's scaling must be an object with type"),
        ([f"{__name__}:Failing"], 1, "Failing cannot be made (test_explain_command.py, line"),
        (["alibi", "--base", "3"], 1, "alibi takes the options bias_max"),
        (["rope", "--layer", "1"], 2, "--layer applies only to --model"),
        (
            ["rope", "--model", "x"],
            2,
            "--model uses the checkpoint's encoding and settings; leave out an",
        ),
        (["--model", "x", "--head-dim", "8"], 2, "leave out --head-dim"),
        (["--model", "x", "--option", "a=1"], 2, "leave out --option"),
        (["--model", "nosuch"], 1, "nosuch is neither a file nor a directory"),
    ],
)
def test_refusals_are_one_sentence_and_write_nothing(here, arguments, code, words, capsys) -> None:
    assert main.main(["explain", *arguments]) == code
    assert words in sentence(capsys)
    assert not list(here.iterdir())


def test_a_layer_that_is_not_there_is_refused(here, capsys) -> None:
    folder = save(random_model(llama()), here / "tiny")
    capsys.readouterr()
    assert main.main(["explain", "--model", str(folder), "--layer", "9"]) == 1
    assert "has the layers 0 to 2, but not 9" in sentence(capsys)


def test_a_file_that_cannot_be_written_is_said(here, capsys) -> None:
    (here / "a.html").mkdir()
    assert main.main(["explain", "nope", "--out", "a.html"]) == 1
    assert "a.html cannot be written (Is a directory)" in sentence(capsys)
