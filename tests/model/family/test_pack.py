"""Packed weights: near the trained ones, small, and read like any others."""

import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ropewalk.model.family.training.losses import windows_of
from ropewalk.model.family.training.pack import is_packed, loss_of, pack
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from ropewalk.model.weights.safetensors_dir import SINGLE, SafetensorsDirectory
from tests.model.family.test_train import CORPUS, short_windows, train  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropewalk.model.family.training.recipe.CONTEXT", 32)
        trained = train(folder / "run", "learned").finish()
    pack(trained, folder / "packed")
    return trained, folder / "packed"


def test_a_packed_model_is_small_and_costs_little(folders) -> None:
    trained, packed = folders
    assert (packed / SINGLE).stat().st_size < 0.35 * (trained / SINGLE).stat().st_size
    assert open_checkpoint(packed).config == open_checkpoint(trained).config
    windows = windows_of(CORPUS.held_out, 32, 8)
    cost = loss_of(packed, windows) - loss_of(trained, windows)
    assert cost != 0 and abs(cost) < 0.01


def test_a_packed_model_comes_without_the_log_of_its_training(folders) -> None:
    left_out = {path.name for path in folders[0].iterdir()} - {p.name for p in folders[1].iterdir()}
    assert left_out == {"log.jsonl"}


def test_whose_packed_weights_they_are(folders, tmp_path) -> None:
    trained, packed = folders
    assert is_packed(trained, packed)
    shutil.copytree(trained, tmp_path / "other")
    tensors = load_file(trained / SINGLE)
    tensors["layers.0.mlp.down.weight"][3] *= 1.5
    save_file(tensors, tmp_path / "other" / SINGLE)
    assert not is_packed(tmp_path / "other", packed)


def test_packing_again_takes_the_place_of_the_first(folders, tmp_path, monkeypatch) -> None:
    target = tmp_path / "packed"
    pack(folders[0], target)
    (target / "left.over").touch()

    def full(*_, **__):
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ropewalk.model.family.training.pack.save_file", full)
        with pytest.raises(OSError, match="No space left"):
            pack(folders[0], target)
    assert is_packed(folders[0], target)  # the first is still there
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    pack(folders[0], target)
    assert not (target / "left.over").exists()


def test_an_encodings_own_weights_are_exact(folders) -> None:
    stored = [SafetensorsDirectory(folder) for folder in folders]
    assert stored[0].names() == stored[1].names()
    table, packed = (weights.read("encoding.table") for weights in stored)
    assert torch.equal(table, packed)


def test_a_scale_that_does_not_fit_is_said(folders, tmp_path) -> None:
    shutil.copytree(folders[1], tmp_path / "broken")
    tensors = load_file(folders[1] / SINGLE)
    name = "layers.0.mlp.down.weight"
    tensors[f"{name}.row_scale"] = tensors[f"{name}.row_scale"][:-1]
    save_file(tensors, tmp_path / "broken" / SINGLE)
    with pytest.raises(CheckpointError, match="row scale of the shape"):
        SafetensorsDirectory(tmp_path / "broken").read(name)


def test_integers_without_a_scale_are_no_weights(folders, tmp_path) -> None:
    shutil.copytree(folders[1], tmp_path / "broken")
    tensors = load_file(folders[1] / SINGLE)
    del tensors["embed.weight.row_scale"]
    save_file(tensors, tmp_path / "broken" / SINGLE)
    with pytest.raises(CheckpointError, match="stored as I8"):
        SafetensorsDirectory(tmp_path / "broken").read("embed.weight")
    assert json.loads((tmp_path / "broken" / "config.json").read_text())["hidden_size"] == 32


def test_a_tokenizer_in_the_folder_above_is_shared(folders, tmp_path) -> None:
    """A member that is copied out of its family needs it, or says what is missing."""
    trained, alone = folders
    assert (alone / "tokenizer.model").is_file()
    family = tmp_path / "family"
    family.mkdir()
    shutil.copy(trained / "tokenizer.model", family)
    pack(trained, family / "member")
    assert sorted(path.name for path in (family / "member").iterdir()) == ["config.json", SINGLE]
    text = "All the men of the village."
    own, shared = (open_checkpoint(each).tokenizer for each in (alone, family / "member"))
    assert own.encode(text, bos=True) == shared.encode(text, bos=True)

    shutil.copytree(family / "member", tmp_path / "out" / "member")
    with pytest.raises(CheckpointError, match=r"the folder above holds no tokenizer\.model: add"):
        open_checkpoint(tmp_path / "out" / "member")
    shutil.copy(trained / "tokenizer.model", tmp_path / "out" / "member")
    assert open_checkpoint(tmp_path / "out" / "member").tokenizer.vocab_size == own.vocab_size
