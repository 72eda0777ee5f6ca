"""Training: learns, is cut off and goes on, and what comes out is served."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import find
from ropewalk.model.family.errors import FamilyError
from ropewalk.model.family.texts.corpus import Corpus, Split
from ropewalk.model.family.texts.prepare import SHIPPED_TOKENIZER
from ropewalk.model.family.training.losses import pieces, windows_of
from ropewalk.model.family.training.recipe import ENCODINGS, Recipe, model_name, new_decoder, shape
from ropewalk.model.family.training.train import Pace, Training
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.products import combined

CPU = Pace(torch.device("cpu"), look_every=25)
RECIPE = Recipe(tokens=50 * 2 * 32, windows=2, warm_up=5)
SHORT = replace(RECIPE, tokens=12 * 2 * 32)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch) -> None:
    monkeypatch.setattr("ropewalk.model.family.training.recipe.CONTEXT", 32)


def small(encoding: str):
    config = replace(
        shape(encoding), vocab_size=4096, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2,
        head_dim=16, intermediate_size=64, trained_context=32, windows=(None, None),
    )  # fmt: skip
    options = find(encoding).usual_options(config)
    return replace(config, encoding=EncodingSpec(encoding, options))


def text(documents: int, seed: int) -> Split:
    """A language of ten words, each of which mostly follows from the one before."""
    drawn = np.random.default_rng(seed)
    pieces = []
    for number in range(documents):
        tokens = [1]
        while len(tokens) < 100:
            known = tokens[-1] % 10 * 3 % 10 + 300
            tokens.append(known if drawn.random() < 0.9 else int(drawn.integers(300, 310)))
        pieces.append((f"made/{number}", tokens))
    return Split.of(pieces)


CORPUS = Corpus(text(30, 1), text(3, 2), "made up", SHIPPED_TOKENIZER.read_bytes())


def train(run: Path, encoding: str = "rope", recipe: Recipe = SHORT, until: int | None = None):
    training = Training(small(encoding), recipe, CORPUS, run, CPU)
    training.train(lambda tokens, loss: None, until)
    return training


def log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


# Of the others, which have no parameters of their own, as rope has none, test_rehearsal.py.
@pytest.mark.parametrize(
    "encoding", combined(ENCODINGS, always=lambda encoding: encoding in ("rope", "t5", "learned"))
)
def test_fifty_steps_learn_something_and_are_served(encoding, tmp_path) -> None:
    training = train(tmp_path, encoding, RECIPE)
    lines = log(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 51))
    assert lines[-1]["tokens"] == RECIPE.tokens
    assert lines[-1]["held_out_loss"] < lines[0]["loss"] - 2
    folder = training.finish()
    assert open_checkpoint(folder).config == training.decoder.program.config
    assert training.finish() == folder  # again, in place of the first
    assert [path.name for path in tmp_path.glob("model*")] == ["model"]


def weights(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in training.decoder.program.named_parameters()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def not_stopped(tmp_path_factory):
    """Of an encoding: weights and losses of a training in one go, which is done once."""

    @cache
    def trained(encoding: str):
        run = tmp_path_factory.mktemp(encoding)
        return weights(train(run, encoding)), [line["loss"] for line in log(run)]

    return trained


@pytest.mark.parametrize("encoding", ["t5", "learned"])
@pytest.mark.parametrize("stop", [5, 11], ids=["stable", "decay"])
def test_going_on_equals_not_having_stopped(encoding, stop, not_stopped, tmp_path) -> None:
    at_once, losses = not_stopped(encoding)
    train(tmp_path, encoding, until=stop)
    assert equal(weights(train(tmp_path, encoding)), at_once)
    assert [line["loss"] for line in log(tmp_path)] == losses


def test_more_tokens_go_on_from_before_the_decay(tmp_path) -> None:
    more = replace(RECIPE, tokens=16 * 2 * 32)
    at_once = weights(train(tmp_path / "once", recipe=more))
    train(tmp_path / "twice")
    again = Training(small("rope"), more, CORPUS, tmp_path / "twice", CPU)
    assert again.step == SHORT.stable_steps
    again.train(lambda tokens, loss: None)
    assert equal(weights(again), at_once)
    assert [line["step"] for line in log(tmp_path / "twice")] == list(range(1, 17))


def test_a_longer_training_leaves_a_finished_model_its_log(tmp_path) -> None:
    """One that was cut off before it saved anything, here after the second of its own steps."""
    train(tmp_path).finish()
    lines = log(tmp_path)
    more = replace(RECIPE, tokens=20 * 2 * 32)
    longer = Training(small("rope"), more, CORPUS, tmp_path, CPU)
    assert longer.step == SHORT.stable_steps
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write("".join(json.dumps(longer._one_step()) + "\n" for _ in range(2)))
    assert log(tmp_path / "model") == lines != log(tmp_path)
    assert train(tmp_path).step == SHORT.steps
    assert log(tmp_path) == lines


def test_fewer_tokens_destroy_nothing(tmp_path) -> None:
    train(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(FamilyError, match="begun for more tokens"):
        train(tmp_path, recipe=replace(SHORT, tokens=6 * 2 * 32))
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == kept


def test_windows_by_two_teach_what_all_together_do(tmp_path) -> None:
    recipe = replace(RECIPE, windows=5, tokens=10 * 5 * 32)
    paces = {"together": CPU, "by_two": replace(CPU, at_once=2)}
    losses = []
    for name, pace in paces.items():
        training = Training(small("rope"), recipe, CORPUS, tmp_path / name, pace)
        training.train(lambda tokens, loss: None)
        losses.append([line["loss"] for line in log(tmp_path / name)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_log_cut_off_in_a_line_is_mended(tmp_path) -> None:
    train(tmp_path, until=7)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    train(tmp_path, until=9)
    assert [line["step"] for line in log(tmp_path)] == list(range(1, 10))


def test_a_training_cut_off_before_its_first_checkpoint_keeps_its_log(tmp_path) -> None:
    """At the stable step weights are kept; the log must have the steps up to there."""

    class Cut(BaseException):
        pass

    def cut(tokens, loss):
        if training.step == SHORT.stable_steps + 1:
            (tmp_path / "kept").write_bytes((tmp_path / "log.jsonl").read_bytes())
            raise Cut

    training = Training(small("rope"), SHORT, CORPUS, tmp_path, CPU)
    with pytest.raises(Cut):
        training.train(cut)
    (tmp_path / "kept").replace(tmp_path / "log.jsonl")  # what was on disk at that moment
    train(tmp_path)
    assert [line["step"] for line in log(tmp_path)] == list(range(1, SHORT.steps + 1))


def test_an_own_encodings_changed_code_is_another_one(tmp_path, monkeypatch) -> None:
    train(tmp_path, until=2)
    monkeypatch.setattr(
        "ropewalk.model.family.training.train.code_digest", lambda encoding: "changed"
    )
    with pytest.raises(FamilyError, match="another recipe, encoding"):
        train(tmp_path)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch) -> None:
    train(tmp_path, until=2)
    kept = (tmp_path / "checkpoint.safetensors").read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("ropewalk.model.family.training.checkpoints.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, until=4)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == kept
    assert not list(tmp_path.glob("*.partial"))


def test_another_recipe_is_not_mixed_in(tmp_path) -> None:
    train(tmp_path, until=2)
    with pytest.raises(FamilyError, match="another recipe"):
        train(tmp_path, recipe=replace(SHORT, matrix_rate=0.1))


def test_a_damaged_checkpoint_is_said(tmp_path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"12345678")
    with pytest.raises(FamilyError, match=r"checkpoint\.safetensors is damaged"):
        train(tmp_path)


def test_a_lost_loss_ends_the_training(tmp_path) -> None:
    training = Training(small("nope"), SHORT, CORPUS, tmp_path, CPU)
    with torch.no_grad():
        training.decoder.program.weights["embed.weight"].fill_(torch.nan)
    with pytest.raises(FamilyError, match="the loss is nan at step 0"):
        training.train(lambda tokens, loss: None)


def test_models_begin_alike_outside_their_encodings() -> None:
    rope, t5 = (weights_of(encoding, 0) for encoding in ("rope", "t5"))
    other = weights_of("rope", 1)
    shared = [name for name in rope if not name.startswith("encoding.")]
    assert all(torch.equal(rope[name], t5[name]) for name in shared)
    assert not torch.equal(rope["embed.weight"], other["embed.weight"])
    matrices = [name for name in shared if rope[name].dim() == 2]
    assert len({float(rope[name].flatten()[0]) for name in matrices}) == len(matrices)


def weights_of(encoding: str, seed: int) -> dict[str, torch.Tensor]:
    decoder = new_decoder(small(encoding), seed, torch.device("cpu"))
    return {name: p.detach() for name, p in decoder.program.named_parameters()}


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(tokens=1000 * 4 * 32, windows=4, warm_up=100, decay=0.25)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[0] == 0.01 and rates[99:751] == [1.0] * 652
    assert rates[875] == pytest.approx(0.5) and rates[999] == pytest.approx(0.004)
    assert model_name("my.package:Kerple") == "ropewalk-kerple"


def test_growing_pieces_begin_with_bos_and_hold_the_tokens_of_their_windows() -> None:
    windows = torch.arange(2 * 33).view(2, 33)
    found = pieces(windows, 8, 99)
    assert found.shape == (8, 9) and set(found[:, 0].tolist()) == {99}
    assert found[5].tolist() == [99, *range(33 + 9, 33 + 17)]
    assert windows[0, 0] == 0 and windows[1, 8] == 41  # the windows stay as they were


@pytest.mark.parametrize("growing", [0, 6 * 2 * 32])
def test_whatever_is_read_at_once_begins_with_bos(growing, tmp_path, monkeypatch) -> None:
    read = []
    gather = Training._gather_gradients
    monkeypatch.setattr(
        Training,
        "_gather_gradients",
        lambda self, tokens: read.append(tokens) or gather(self, tokens),
    )
    train(tmp_path, "nope", replace(SHORT, growing=growing))
    assert {tuple(tokens.shape) for tokens in read} >= {(2, 33)}
    held_out = windows_of(CORPUS.held_out, 32, 5)
    assert all((tokens[:, 0] == 1).all() for tokens in (*read, held_out))
    assert held_out.shape == (5, 33) and (held_out[:, 1:] != 1).all()


def test_pieces_grow_from_an_eighth_to_the_whole() -> None:
    recipe = replace(RECIPE, growing=6 * 2 * 32)
    assert [recipe.length(step) for step in range(8)] == [4, 4, 8, 8, 16, 16, 32, 32]
    assert {RECIPE.length(step) for step in range(8)} == {32}


def test_growing_learns_and_goes_on_as_if_never_cut_off(tmp_path) -> None:
    growing = replace(SHORT, growing=6 * 2 * 32)
    whole = train(tmp_path / "whole", "nope", growing)
    train(tmp_path / "cut", "nope", growing, until=3)
    again = train(tmp_path / "cut", "nope", growing)
    found, expected = weights(again), weights(whole)
    assert found.keys() == expected.keys() and equal(found, expected)
    plain = train(tmp_path / "plain", "nope", SHORT)
    assert not torch.equal(weights(plain)["embed.weight"], expected["embed.weight"])
