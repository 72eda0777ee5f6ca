"""Auditing the first layers of a model for some tokens is auditing the model."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk.model.attention.sdpa import SdpaAttention
from ropewalk.model.decoder import Decoder
from ropewalk.model.inspect import appended, audit_arms
from ropewalk.model.inspect.appended import append, arms_for, first_layers
from ropewalk.model.inspect.audit import Arm, Watch
from ropewalk.model.layers.executor import TorchExecutor
from ropewalk.model.loading.checkpoints import InUse, open_checkpoint
from ropewalk.model.program import shapes_of
from tests.model import checkpoints
from tests.model.families import FAMILIES
from tests.model.test_parity import drawn

TOKENS = [3 + n * 5 % 23 for n in range(40)]
SOME = ("llama-tied", "qwen3-biases-windows", "smollm3", "opt-350m", "gpt-neox", "bloom", "xglm")

pytestmark = pytest.mark.usefixtures("one_thread")


def in_use(name, tmp_path):
    folder = checkpoints.save(drawn(FAMILIES[name].config), tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    context = FAMILIES[name].context or checkpoint.config.trained_context
    return InUse(checkpoint, context, torch.float32, torch.float32, None, 16)


@pytest.mark.parametrize("name", SOME)
def test_the_first_layers_store_what_they_store_in_the_whole_model(name, tmp_path) -> None:
    used = in_use(name, tmp_path)
    vocabulary = sorted(set(TOKENS))
    short = first_layers(used, 1, vocabulary)
    whole = audit_arms.from_checkpoint(used.checkpoint, used.context)
    stored = []
    for program, tokens in (
        (short, [vocabulary.index(token) for token in TOKENS]),
        (whole, TOKENS),
    ):
        watch = Watch(Arm("", "", Decoder(program, TorchExecutor(program, SdpaAttention))), 40)
        watch.step(tokens)
        stored.append(watch.left[:, :1, :40])
    torch.testing.assert_close(*stored, atol=1e-9, rtol=1e-9)


def test_appending_changes_nothing_unless_frequencies_follow_the_length(tmp_path) -> None:
    used = in_use("llama-tied", tmp_path)
    layers, heads = 2, used.checkpoint.config.num_kv_heads
    arms = arms_for(used.checkpoint.config)
    assert {"own", "rope:dynamic", "rope:dynamic-rewrite", "t5", "learned", "path"} < arms.keys()
    assert "rope" not in arms  # that is its own
    for arm in arms:
        options = {"trained_length": None, "layers": layers, "steps": 3}
        found = append(used, arm, TOKENS[:20], TOKENS[20:], **options)
        assert [step.length for step in found.steps] == [27, 34, 40]
        assert [(block.first, block.tokens) for block in found.blocks] == [(0, 16), (16, 4)]
        assert found.entries_per_token == 2 * layers * heads
        assert not any(step.unexpected for step in found.steps)
        follows = arm.startswith("rope:dynamic") or arm == "path"
        assert any(step.should_change for step in found.steps) == follows
        rewritten = arm in ("rope:dynamic-rewrite", "path")
        assert [block.before != block.after for block in found.blocks] == [rewritten] * 2
        assert [bool(block.changed) for block in found.blocks] == [rewritten] * 2


def appended_with(used, arm, context=None, **options):
    """What `append` finds where the model has these options of its encoding besides its own."""
    config = used.checkpoint.config
    spec = replace(config.encoding, options={**config.encoding.options, **options})
    checkpoint = replace(used.checkpoint, config=replace(config, encoding=spec))
    used = replace(used, checkpoint=checkpoint, context=context or used.context)
    limits = {"trained_length": None, "layers": 1, "steps": 3}
    return append(used, arm, TOKENS[:20], TOKENS[20:], **limits)


def test_frequencies_are_those_of_the_served_context(tmp_path) -> None:
    """Of a model whose frequencies depend on it."""
    used = in_use("llama-tied", tmp_path)
    trained = used.checkpoint.config.trained_context
    scaling = {"type": "dynamic", "factor": 2.0, "original_context": trained // 2}
    contexts = (trained // 2, trained, 2 * trained)
    assert trained // 2 >= len(TOKENS)
    found = [appended_with(used, "own", context, scaling=scaling) for context in contexts]
    assert len({one.blocks[0].before for one in found}) == len(contexts)
    plain = appended_with(used, "own", trained // 2)
    assert found[0].blocks[0].before == plain.blocks[0].before


@pytest.mark.parametrize("storage", ["raw", "block"])
def test_keys_that_follow_the_length_are_rotated_once(storage, tmp_path) -> None:
    used = in_use("llama-tied", tmp_path)
    for arm in ("rope:dynamic", "rope:dynamic-rewrite"):
        assert appended_with(used, arm, storage=storage) == appended_with(used, arm)


def test_less_is_audited_of_a_larger_model(tmp_path, monkeypatch) -> None:
    used = in_use("llama-tied", tmp_path)

    def audited():
        options = {"trained_length": None, "layers": 2, "steps": 4}
        found = append(used, "own", TOKENS[:20], TOKENS[20:], **options)
        return found.layers, len(found.steps)

    sizes = []
    for most in (1e11, 1e7, 3e6, 5e5):
        monkeypatch.setattr(appended, "MOST_WORK", most)
        try:
            sizes.append(audited())
        except appended.TooMuch:
            sizes.append(None)
    assert sizes[0] == (2, 4) and sizes[-1] is None
    assert (1, 1) in sizes or any(size and size < (2, 4) for size in sizes[1:3])
    monkeypatch.setattr(appended, "MOST_WORK", 1e11)
    shapes = shapes_of(first_layers(used, 1, sorted(set(TOKENS))).ops)
    matrices = [own for name, own in shapes.items() if name.startswith("layers.") and len(own) > 1]
    layer = 8 * sum(map(math.prod, matrices))
    for most, layers in ((2 * layer, 2), (2 * layer - 1, 1)):
        monkeypatch.setattr(appended, "MOST_BYTES", most)
        assert audited() == (layers, 4)
    monkeypatch.setattr(appended, "MOST_BYTES", layer - 1)
    with pytest.raises(appended.TooMuch, match="too much memory in float64"):
        audited()
