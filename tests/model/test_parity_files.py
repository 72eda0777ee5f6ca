"""Files that say the same in other ways, and files that say what cannot be served: by family."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ropewalk.model.architectures.stored import FusedByHead, LessOne, Pairs, Transposed
from ropewalk.model.config import EncodingSpec
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from tests.model import checkpoints
from tests.model.checkpoints import loaded
from tests.model.families import FAMILIES, TRAINED, trained_gptj, trained_mpt, trained_neox
from tests.model.plain import bloom, falcon, gpt2, gpt_neox, mpt, opt
from tests.model.test_parity import check, difference, drawn

NEOX, GPTJ = FAMILIES["neox-odd-heads"], FAMILIES["gptj-odd-heads"]


def saved(config, folder):
    model = drawn(config)
    checkpoints.save(model, folder)
    return model


def rewrite(folder, change):
    """Store what `change` makes of the tensors instead."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


def check_folder(folder, model, row):
    check(loaded(open_checkpoint(folder), context=row.context), model, row)


def with_description(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


# ------------------------------------------------------------------ names of tensors


def bare(prefix, head=None):
    """A function: tensors as the bare model has them, without the prefix; with a head or none."""

    def change(tensors):
        names = {name: name.removeprefix(prefix) for name in tensors if name != "lm_head.weight"}
        assert any(old != new for old, new in names.items())
        changed = {new: tensors[old] for old, new in names.items()}
        return changed if head is None else changed | {"lm_head.weight": head}

    return change


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("bloom", "transformer."),
        ("bloom-12-heads", "transformer."),
        ("gpt2", "transformer."),
        ("opt", "model."),
    ],
)
def test_the_bare_model(name, prefix, tmp_path):
    """The first ones of these families were published without the prefix and the head."""
    row = FAMILIES[name]
    model = saved(row.config, tmp_path)
    check_folder(rewrite(tmp_path, bare(prefix)), model, row)


def test_a_bare_bloom_with_its_head(tmp_path):
    row = FAMILIES["bloom-12-heads"]
    model = saved(row.config, tmp_path)
    head = model.lm_head.weight.detach().clone()
    check_folder(rewrite(tmp_path, bare("transformer.", head)), model, row)


def test_a_bare_bloom_with_a_head_of_its_own(tmp_path):
    model = saved(FAMILIES["bloom-12-heads"].config, tmp_path)
    rewrite(tmp_path, bare("transformer.", model.lm_head.weight.detach() + 1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be tied to word_embeddings"):
        loaded(open_checkpoint(tmp_path))


def derived(name, layers=3):
    """What checkpoints of older versions hold besides, masks and frequencies."""
    buffers = {
        "neox": ("gpt_neox.layers.{}.attention.", "rotary_emb.inv_freq"),
        "gptj": ("transformer.h.{}.attn.", "embed_positions"),
    }
    prefix, angles = buffers[name]
    found = {}
    for layer in range(layers):
        own = prefix.format(layer)
        found[f"{own}bias"] = torch.ones(1, 1, TRAINED, TRAINED, dtype=torch.bool).tril()
        found[f"{own}masked_bias"] = torch.tensor(-1e9)
        found[f"{own}{angles}"] = torch.ones(3)
    return found


@pytest.mark.parametrize("name", ["neox", "gptj"])
def test_buffers_of_older_files_are_left_unread(name, tmp_path):
    model = saved({"neox": trained_neox, "gptj": trained_gptj}[name](), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | derived(name))
    check_folder(tmp_path, model, NEOX)


@pytest.mark.parametrize(
    "name", ["gpt_neox.layers.0.attention.scale", "transformer.h.0.attn.scale"]
)
def test_other_tensors_are_refused(name, tmp_path):
    saved(trained_neox() if "neox" in name else trained_gptj(), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"holds tensor '{name}'"):
        open_checkpoint(tmp_path)


def renamed(tensors):
    """The head as transformers calls it in memory."""
    return {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "order", [LessOne(), Transposed(), Pairs(2, 4), FusedByHead(2)], ids=lambda order: repr(order)
)
def test_orders_say_what_shape_they_make(order):
    shape = (12,) if isinstance(order, LessOne) else (12, 5)
    assert tuple(order.undo(torch.ones(shape)).shape) == order.shape(shape)


def test_norms_less_one_are_rounded_once():
    assert LessOne().undo(torch.tensor([0.5, -1.0]).bfloat16()).tolist() == [1.5, 0.0]


GEMMA3 = (transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config)
MISTRAL3 = (transformers.Mistral3ForConditionalGeneration, transformers.Mistral3Config)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma3", GEMMA3),
        ("gemma3-biases-untied-scale", GEMMA3),
        ("ministral3-window-tied", MISTRAL3),
        ("mistral-window", MISTRAL3),
    ],
)
def test_the_text_of_a_model_with_images(family, kinds, older, tmp_path):
    row, (kind, config) = FAMILIES[family], kinds
    text, eyes = drawn(row.config), {"hidden_size": 8, "intermediate_size": 8, "image_size": 28}
    eyes |= {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    tied = row.config.tie_word_embeddings
    model = kind(
        config(text_config=row.config.to_dict(), vision_config=eyes, tie_word_embeddings=bool(tied))
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    checkpoints.save(model, tmp_path, save_original_format=older)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in names) == older
    check_folder(tmp_path, text, row)
    with_description(tmp_path, lambda values: drop(values, "tie_word_embeddings"))
    check_folder(tmp_path, text, row)  # the tensors tell
    with_description(tmp_path, lambda values: values.pop("text_config"))
    with pytest.raises(CheckpointError, match="text_config is missing"):
        open_checkpoint(tmp_path)


def drop(values, key):
    """From a description and the text's within it."""
    values.pop(key, None)
    values["text_config"].pop(key, None)


def test_the_older_spelling_of_queries_that_grow(tmp_path):
    row = FAMILIES["ministral3"]
    model = saved(row.config, tmp_path)

    def respelled(values):
        values["rope_scaling"] = values.pop("rope_parameters")

    with_description(tmp_path, respelled)
    check_folder(tmp_path, model, row)
    with_description(tmp_path, lambda values: values["rope_scaling"].pop("llama_4_scaling_beta"))
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta is missing"):
        open_checkpoint(tmp_path)
    with_description(tmp_path, lambda values: values.pop("rope_scaling"))
    with pytest.raises(CheckpointError, match="rope_parameters is missing"):
        open_checkpoint(tmp_path)


def test_a_text_of_no_family_that_is_known_with_images(tmp_path):
    row = FAMILIES["ministral3-window-tied"]
    saved(row.config, tmp_path)
    description = {"model_type": "gemma3", "text_config": row.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="model_type must be gemma3_text, not 'ministral3'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_norms_that_are_stored_as_differences_are_not_rounded(family, tmp_path):
    """In bfloat16 1 + w would lose most of what w says."""
    model = drawn(FAMILIES[family].config).bfloat16()
    folder = checkpoints.save(model, tmp_path)
    program = checkpoints.loaded(open_checkpoint(folder), torch.bfloat16).executor.program
    for layer, block in enumerate(model.model.layers):
        theirs = 1 + block.pre_feedforward_layernorm.weight.float()
        assert torch.equal(program.full(f"layers.{layer}.mlp_norm.weight"), theirs)
        assert not torch.equal(theirs.bfloat16().float(), theirs)
    assert program.dtype is torch.bfloat16


def test_both_names_of_the_head(tmp_path):
    """transformers writes the one of the published files, or the other when told to."""
    model = saved(trained_neox(), tmp_path / "renamed")
    assert "embed_out.weight" in load_file(tmp_path / "renamed" / "model.safetensors")
    rewrite(tmp_path / "renamed", renamed)
    checkpoints.save(model, tmp_path / "written", save_original_format=False)
    for folder in (tmp_path / "renamed", tmp_path / "written"):
        assert "lm_head.weight" in load_file(folder / "model.safetensors")
        check_folder(folder, model, NEOX)


@pytest.mark.parametrize("head", ["embed_out.weight", "lm_head.weight"])
def test_a_tied_head_beside_the_embedding(head, tmp_path):
    model = saved(trained_neox(tie_word_embeddings=True), tmp_path)
    embedding = model.gpt_neox.embed_in.weight.detach()
    rewrite(tmp_path, lambda tensors: tensors | {head: embedding.clone()})
    check_folder(tmp_path, model, NEOX)
    rewrite(tmp_path, lambda tensors: tensors | {head: embedding + 1})
    with pytest.raises(CheckpointError, match=rf"{head} should be tied to gpt_neox\.embed_in"):
        loaded(open_checkpoint(tmp_path))


def test_an_mpt_with_biases_in_gguf_is_refused(tmp_path):
    extra = {"blk.0.attn_output.bias": np.ones(36, dtype=np.float32)}
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", drawn(trained_mpt()), tensors=extra)
    with pytest.raises(CheckpointError, match=r"holds tensor 'blk\.0\.attn_output\.bias'"):
        open_checkpoint(path)


# ------------------------------------------------------------------ descriptions


@pytest.mark.parametrize(
    ("config", "removed", "older"),
    [
        (
            bloom(),
            ("hidden_size", "n_head", "rope_parameters"),
            {"n_embed": 36, "num_attention_heads": 6, "seq_length": 64},
        ),
        (gpt_neox(), ("rope_parameters",), {"rotary_pct": 0.25, "rotary_emb_base": 1234.0}),
    ],
    ids=["bloom", "gpt_neox"],
)
def test_older_spellings(config, removed, older, tmp_path):
    """Of BLOOM's shape and GPT-NeoX's rotation, as published."""

    def to_older(values):
        for name in removed:
            values.pop(name, None)
        values.update(older)

    model = saved(config, tmp_path)
    with_description(tmp_path, to_older)
    check_folder(tmp_path, model, FAMILIES["bloom"])


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2-yarn-recipe", "phi3-partial", "smollm3"])
def test_older_spellings_of_rope(name, tmp_path):
    def to_older(values):
        section = values.pop("rope_parameters")
        section["type"] = section.pop("rope_type")
        values["rope_theta"] = section.pop("rope_theta")
        if "partial_rotary_factor" in section:
            values["partial_rotary_factor"] = section.pop("partial_rotary_factor")
        values["rope_scaling"] = None if section["type"] == "default" else section

    saved(FAMILIES[name].config, tmp_path)
    written = open_checkpoint(tmp_path).config
    with_description(tmp_path, to_older)
    assert open_checkpoint(tmp_path).config == written


@pytest.mark.parametrize(
    ("config", "saying"),
    [
        (bloom(apply_residual_connection_post_layernorm=True), "post_layernorm is not supported"),
        (mpt({"qk_ln": True}), "qk_ln is not supported"),
        (mpt({"alibi": False}), "served with ALiBi only"),
        (mpt(logit_scale=0.5), "logit_scale is not supported"),
        (falcon(alibi=False), "only Falcon-RW is served"),
        (falcon(multi_query=True), "only Falcon-RW is served"),
        (gpt2(scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx is not supported"),
        (opt(layer_norm_elementwise_affine=False), "elementwise_affine is false"),
        (opt(_remove_final_layer_norm=True), "_remove_final_layer_norm"),
    ],
)
def test_what_would_change_the_answers_is_refused(config, saying, tmp_path):
    saved(config, tmp_path)
    with pytest.raises(CheckpointError, match=saying):
        open_checkpoint(tmp_path)


# ------------------------------------------------------------------ what parity would show


def test_falcon_needs_its_rounding_at_long_range(tmp_path):
    """From position 256 on, bfloat16 has no room for every position."""
    row = FAMILIES["falcon-12-heads"]
    model = saved(row.config, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    exact = loaded(checkpoint, context=row.context)
    assert difference(exact, model, 390, 300) <= row.tolerance
    config = replace(checkpoint.config, encoding=EncodingSpec("alibi", {"scaled": True}))
    other = loaded(replace(checkpoint, config=config), context=row.context)
    assert difference(other, model, 390) > 100 * row.tolerance


@pytest.mark.parametrize(("row", "other"), [(NEOX, {"width": 4}), (GPTJ, {"layout": "half"})])
def test_parity_would_show_a_wrong_rotation(row, other, tmp_path):
    """Which coordinates turn with which matters to the logits."""
    model = saved(row.config, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.config.encoding.options.update(other)
    with pytest.raises(AssertionError):
        check(loaded(checkpoint, context=row.context), model, row)
