"""The weights in the package: six, small, and of models that know English; their card is true."""

import random
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from ropewalk.model.family.evaluation import evaluate, results
from ropewalk.model.family.evaluation.evaluate import Task
from ropewalk.model.family.evaluation.members import load
from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.family.evaluation.report.card import CARD
from ropewalk.model.family.evaluation.report.findings import about_length, shipped
from ropewalk.model.family.evaluation.samples import TEMPERATURE, continuation
from ropewalk.model.family.training.pack import loss_of
from ropewalk.model.family.training.recipe import ENCODINGS, model_name
from ropewalk.model.loading.checkpoints import open_checkpoint
from ropewalk.model.weights.safetensors_dir import SINGLE
from ropewalk.server.download import FAMILY
from tests.model.family.evaluation.trained import corpus
from tests.model.family.grammar import (
    PARSER,
    PROMPTS,
    TOKENS,
    is_made_up,
    sentences,
    shuffled,
    taken,
)

FOLDER = FAMILY.parent
MOST = 30 * 2**20  # bytes of all six
PASSAGE = """\
In the morning the old captain came down to the harbour, and there he found his ship, and all
the men of the village standing about her. "My friends," he said, "we have waited long enough for
a fair wind. The people of this country have trusted us with their letters and their money, and I
will not have it said that we were afraid of the sea." Then his wife gave him her hand, and he
kissed her, and went on board; and before the sun was high they were out of sight of the land."""


@pytest.fixture(scope="module")
def evaluation():
    found = results.read(FOLDER / "evaluation.json")
    assert found is not None
    return found


def test_they_are_six_and_small() -> None:
    folders = sorted(path.parent for path in FAMILY.glob("*/config.json"))
    assert [each.name for each in folders] == sorted(map(model_name, ENCODINGS))
    assert [path.parent for path in FAMILY.rglob("tokenizer.model")] == [FAMILY]  # all share it
    assert sum(path.stat().st_size for path in FAMILY.rglob("*") if path.is_file()) < MOST


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_knows_english(encoding) -> None:
    """Tokens by chance cost 8.3 nats each; in another order these cost nearly as much."""
    folder = FAMILY / model_name(encoding)
    tokens = open_checkpoint(folder).tokenizer.encode(PASSAGE, bos=True)
    written = torch.tensor([tokens])
    shuffled = written[:, torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    loss = loss_of(folder, written)
    assert loss < 4.5 and loss + 3 < loss_of(folder, shuffled)


@pytest.mark.skipif(shutil.which(PARSER) is None, reason=f"{PARSER} is not installed")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_writes_grammatical_english(encoding) -> None:
    """Measured anew, with fewer texts: at worst three deviations below what was found."""
    checkpoint = open_checkpoint(FAMILY / model_name(encoding))
    reader = Reader(load(checkpoint, 256, torch.device("cpu")), 256)
    texts = (
        prompt + continuation(reader, checkpoint.tokenizer, prompt, TEMPERATURE, seed, TOKENS)
        for prompt, seed in product(PROMPTS, (9,))
    )
    written = [one for text in texts for one in sentences(text) if not is_made_up(one)]
    mixed = [shuffled(one, random.Random(0)) for one in written]
    parser = shutil.which(PARSER)
    assert len(written) >= 40
    assert sum(taken(written, parser)) > 0.45 * len(written)
    assert sum(taken(mixed, parser)) < 0.15 * len(mixed)


def test_what_was_measured_are_these_weights(evaluation, tmp_path, monkeypatch) -> None:
    """Nothing would be measured anew, which for the training curves is not possible."""
    monkeypatch.setattr(evaluate, "Subject", None)  # which loads weights
    path = tmp_path / "evaluation.json"
    results.write(evaluation, path)
    texts = replace(corpus(), fingerprint=evaluation.corpus)
    task = Task(texts, evaluation.sizes, torch.device("cpu"), None, None, FAMILY)
    again = evaluate.evaluate(FAMILY, path, task).members
    assert list(again) == shipped(evaluation.members)


def test_the_card_says_what_was_measured(evaluation) -> None:
    card = (FOLDER / CARD).read_text()
    members = shipped(evaluation.members)
    assert {one.label for one in members} == set(ENCODINGS)
    for one in members:
        assert about_length(one) in card and f"| `{one.digest[:12]}` |" in card
        assert one.packed is not None
        assert one.packed.size == (FAMILY / one.name / SINGLE).stat().st_size
        assert abs(one.packed.packed - one.packed.trained) < 0.01
    for picture in re.findall(r"\]\((\S+\.svg)\)", card):
        assert (FOLDER / Path(picture)).exists()
