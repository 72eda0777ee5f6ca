"""`ropewalk family evaluate` and `report`, from trained models to a card."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from ropewalk.model.family.evaluation import results, shortened
from ropewalk.model.family.evaluation.report import card as report_card
from ropewalk.model.family.evaluation.results import Sizes
from ropewalk.model.family.texts import corpus
from ropewalk.server import download
from ropewalk.server.cli import main
from ropewalk.server.download import home as home_of_kernels
from ropewalk.server.studies import family as family_command
from tests.model.family.evaluation import trained
from tests.model.family.evaluation.made_up import family
from tests.model.family.evaluation.trained import ENCODINGS, save
from tests.server.test_cli import sentence

SIZES = Sizes(
    context=128, texts=2, short_texts=2, served_texts=2, trials=2, lengths=(192,), distances=(32,)
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """With a corpus and two models, one of an encoding that is not among the six."""
    (tmp_path / "kernels").symlink_to(home_of_kernels() / "kernels")  # not compiled once more
    monkeypatch.setenv("ROPEWALK_HOME", str(tmp_path))
    monkeypatch.setattr(family_command, "QUICK", SIZES)
    monkeypatch.setattr(shortened, "SLIDES", (1,))
    folder = tmp_path / "family"
    folder.mkdir()
    corpus.save(trained.corpus(length=500), folder / "corpus.npz")
    save(folder / "runs" / "ropewalk-alibi", ENCODINGS["alibi"])
    own = replace(ENCODINGS["t5"], name="ropewalk.model.encodings.t5:T5")
    save(folder / "runs" / "ropewalk-mine" / "model", own)
    return folder


def test_models_of_any_encoding_are_evaluated(home, capsys) -> None:
    trusted = ["--trust-encoding", "ropewalk.model.encodings.t5:T5"]
    assert main.main(["family", "evaluate", "--quick", "--device", "cpu", *trusted]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{home / 'quick-evaluation.json'}\n"
    assert "ropewalk-mine: over HTTP" in printed.err
    found = json.loads((home / "quick-evaluation.json").read_text())["members"]
    assert [one["label"] for one in found] == ["alibi", "mine"]
    for one in found:
        assert one["served"][0]["largest"] < 1e-4


def test_without_models_the_next_step_is_named(home, capsys, tmp_path) -> None:
    assert main.main(["family", "evaluate", "--models", str(tmp_path / "none")]) == 1
    assert "run ropewalk family train" in sentence(capsys)


def test_the_report_is_a_card_and_pictures(home, capsys) -> None:
    made = home / "evaluation.json"
    results.write(family(), made)
    (home / "data_card.md").write_text("| source | digest |\n")
    notes = home / "notes.md"
    notes.write_text("Because the texts are short.\n")
    assert main.main(["family", "report", "--notes", str(notes)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(home / "report" / "MODEL_CARD.md")
    card = (home / "report" / "MODEL_CARD.md").read_text()
    assert "| scale 4.0, layout split |" in card
    assert re.search(
        r"One document has \d+ of the windows, so they count as much as \d+\.\d doc", card
    )
    assert "ropewalk family evaluate --trust-encoding package.module:Class\n" in card
    assert "| source | digest |" in card and card.endswith("Because the texts are short.\n")
    for name in ("loss", "recall", "training", "operations"):
        picture = home / "report" / f"evaluation-{name}.svg"
        assert str(picture) in printed and f"({picture.name})" in card
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_bundled_models_stand_beside_ones_own(home, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(report_card, "svg", lambda picture, name: "")  # which take seconds
    monkeypatch.setattr(download, "FAMILY", tmp_path / "package" / "weights")
    bundled = family()
    results.write(bundled, tmp_path / "package" / "evaluation.json")
    mine = replace(bundled.members[0], name="ropewalk-kerple", label="kerple")
    own = replace(bundled, members=(mine,))

    def models(evaluation) -> list[str]:
        results.write(evaluation, home / "evaluation.json")
        assert main.main(["family", "report"]) == 0
        card = (home / "report" / "MODEL_CARD.md").read_text()
        rows = card.partition("## Models")[2].partition("\n## ")[0]
        return re.findall(r"^\| (ropewalk-\S+)", rows, re.MULTILINE)

    served = [one.name for one in bundled.members if one.seed is None]
    assert models(own) == [*served, "ropewalk-kerple"]
    assert models(replace(own, corpus="other texts")) == ["ropewalk-kerple"]
    assert models(bundled) == served  # those of the same name are one's own


def test_a_report_without_figures_names_the_command(home, capsys) -> None:
    assert main.main(["family", "report"]) == 1
    assert "evaluation.json is missing; run ropewalk family evaluate" in sentence(capsys)
