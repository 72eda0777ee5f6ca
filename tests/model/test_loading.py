"""Whole checkpoints: opened, refused in one sentence, and copied into a decoder."""

import json
import os
import random
import re
import shutil
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ropewalk.model.architectures.stored import Pairs
from ropewalk.model.encodings.base import create
from ropewalk.model.loading.checkpoints import CheckpointError, load_program, open_checkpoint
from tests.model import checkpoints, refusals
from tests.model.checkpoints import CPU, END, TOKENS, llama, loaded
from tests.model.tiny import parameters_of

SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def tied():
    return checkpoints.random_model(llama(tie_word_embeddings=True, **SMALL))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, tied):
    """A tied Llama with biases off, as transformers writes it."""
    return checkpoints.save(tied, tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def gguf_path(tied, tmp_path):
    return checkpoints.write_gguf(tmp_path / "tiny.gguf", tied)


def edit(folder, name="config.json", **changes):
    values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(values | changes))
    return folder


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(path, saying):
    message = refusals.refused(saying, open_checkpoint, path)
    assert str(path) in message
    return message


def refused_at_load(path, saying, dtype=torch.float32):
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=saying):
        loaded(checkpoint, dtype)


def test_a_directory(pristine):
    checkpoint = open_checkpoint(pristine)
    assert checkpoint.path == pristine
    assert checkpoint.config.tied_embeddings
    assert checkpoint.chat_template is None
    assert checkpoint.stop_ids == {TOKENS.index(END)}
    assert checkpoint.tokenizer.encode("th!", bos=False) == [257, TOKENS.index("!")]


def test_a_chat_template_of_the_users_own(pristine, gguf_path, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("own {{ messages }}")
    for path in (pristine, gguf_path):
        template = open_checkpoint(path, template=own).chat_template
        assert template.render([], add_generation_prompt=True) == "own []"
    own.write_text("{{")
    refusals.refused("chat template cannot be compiled", open_checkpoint, pristine, template=own)


def test_a_gguf_file_gives_the_same(pristine, gguf_path):
    ours, theirs = open_checkpoint(gguf_path), open_checkpoint(pristine)
    norm_eps = pytest.approx(theirs.config.norm_eps, rel=1e-6)  # float32 in the file
    assert replace(ours.config, norm_eps=theirs.config.norm_eps) == theirs.config
    assert ours.config.norm_eps == norm_eps
    assert ours.stop_ids == theirs.stop_ids
    assert ours.tokenizer.encode("the", bos=False) == theirs.tokenizer.encode("the", bos=False)
    expected = parameters_of(loaded(theirs))
    found = parameters_of(loaded(ours))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("width", [8, 6, 2])
def test_pairs_become_halves(width):
    """Coordinate i of the half that turns first was stored at 2i; the rest stays in place."""
    stored = torch.arange(2 * 8).reshape(2, 8)
    split = Pairs(num_heads=2, width=width).undo(stored.reshape(16, 1)).reshape(2, 8)
    half = width // 2
    assert torch.equal(split[:, :half], stored[:, 0:width:2])
    assert torch.equal(split[:, half:width], stored[:, 1:width:2])
    assert torch.equal(split[:, width:], stored[:, width:])


def test_progress_counts_every_parameter(pristine):
    checkpoint, heard = open_checkpoint(pristine), []
    config = checkpoint.config
    encoding = create(config.encoding, config, 16, CPU)
    program = load_program(
        checkpoint,
        encoding,
        dtype=torch.float32,
        device=CPU,
        progress=lambda done, total: heard.append((done, total)),
    )
    total = len(list(program.named_parameters()))
    assert heard == [(done, total) for done in range(1, total + 1)]


def test_no_parameter_is_left_out(pristine):
    """A decoder that is not the checkpoint's is refused by the parameter's name."""
    checkpoint = open_checkpoint(pristine)
    for change, saying in [
        ({"qkv_bias": True}, r"layers\.0\.attention\.qkv\.bias.*gives None"),
        ({"tied_embeddings": False}, r"head\.weight.*gives None"),
        ({"num_layers": 1, "windows": (None,)}, r"layers\.1\..*has the shape None"),
        ({"intermediate_size": 41}, r"mlp\.down\.weight"),
    ]:
        changed = replace(checkpoint, config=replace(checkpoint.config, **change))
        encoding = create(changed.config.encoding, changed.config, 16, CPU)
        with pytest.raises(CheckpointError, match=saying):
            load_program(changed, encoding, dtype=torch.float32, device=CPU)


def test_stop_ids_are_everyones(folder):
    edit(folder, "generation_config.json", eos_token_id=[7, 8])
    edit(folder, eos_token_id=9)
    edit(folder, "tokenizer_config.json", eos_token=END)
    assert open_checkpoint(folder).stop_ids == {7, 8, 9, TOKENS.index(END)}
    # An id that the model cannot produce ends nothing.
    edit(folder, "generation_config.json", eos_token_id=[7, 260, -1])
    assert open_checkpoint(folder).stop_ids == {7, 9, TOKENS.index(END)}
    edit(folder, "generation_config.json", eos_token_id="7")
    refused(folder, "generation_config.json: eos_token_id must be a token id")


def gguf_with_tokens(path, model, more):
    """The model's GGUF with these tokens after the tiny tokenizer's."""
    writer = checkpoints.gguf_writer(path, model.config, more)
    for name, values in checkpoints.gguf_tensors(model).items():
        writer.add_tensor(name, values)
    return checkpoints.finish(writer, path)


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        (["<|endoftext|>", "<|end_of_text|>"], {256, 258, 259}),
        (["<|im_start|>", "<end_of_turn>"], {256, 259}),
        (["<|return|>", "<|call|>"], {258, 259}),  # there, the declared <|end|> is none
        (["<|file_sep|>", "<unused0>", "<EOT>"], {256, 258}),  # 260 is not embedded
    ],
)
def test_a_gguf_answer_ends_at_every_end_of_its_vocabulary(more, ends, tied, tmp_path):
    """The file declares one, as files of Qwen and SmolLM2 do."""
    assert open_checkpoint(gguf_with_tokens(tmp_path / "x.gguf", tied, more)).stop_ids == ends


def test_harmless_extra_tensors(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(5)

    decoder = loaded(open_checkpoint(edit_tensors(folder, change)))
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(parameters_of(decoder)["embed.weight"], stored)


def test_a_tied_head_that_differs(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    refused_at_load(edit_tensors(folder, change), "lm_head.weight should be tied")


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


V_PROJ = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        (drop(V_PROJ), f"lacks tensor '{V_PROJ}', which"),
        (drop("model.norm.weight"), "lacks tensor 'model.norm.weight'"),
        (put("extra", torch.ones(1)), "holds tensor 'extra', which"),
        (put("model.layers.2.mlp.up_proj.weight", torch.ones(1)), r"layers\.2\.mlp"),
        (put("model.layers.0.self_attn.q_proj.bias", torch.ones(60)), r"q_proj\.bias"),
        (put("../../x\n", torch.ones(1)), r"'\.\./\.\./x\\n'"),
        (put(V_PROJ, torch.ones(48, 20)), r"shape \[20, 48\], but has \[48, 20\]"),
        (put(V_PROJ, torch.ones(960)), r"but has \[960\]"),
        (put("model.embed_tokens.weight", torch.ones(261, 48)), r"\[260, 48\], but has \[261"),
    ],
)
def test_names_and_shapes_are_exact(change, saying, folder):
    refused(edit_tensors(folder, change), saying)


def test_several_missing_are_counted(folder):
    def change(tensors):
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]

    refused(edit_tensors(folder, change), "lacks tensor 'model.layers.0.mlp.* and 5 more, which")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(value, folder):
    def change(tensors):
        tensors[V_PROJ][3, 5] = value

    refused_at_load(edit_tensors(folder, change), re.escape(f"{V_PROJ} holds weights that are not"))


def test_weights_that_overflow_the_served_type(folder):
    def change(tensors):
        tensors[V_PROJ][3, 5] = 1e6

    edit_tensors(folder, change)
    assert loaded(open_checkpoint(folder), torch.bfloat16)
    refused_at_load(folder, "not finite in torch.float16", torch.float16)


def test_integer_weights(folder):
    def change(tensors):
        tensors[V_PROJ] = tensors[V_PROJ].to(torch.int8)

    refused_at_load(edit_tensors(folder, change), "stored as I8")


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"model_type": "bert"}, r"'bert'; supported are .*llama, .*mistral, .*qwen3"),
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 3}, "lacks tensor"),
        ({"num_hidden_layers": 1}, "holds tensor"),
        ({"intermediate_size": 41}, r"mlp.*shape"),
        ({"vocab_size": 1 << 22}, "shape"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "auto_map"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "different types"),
        ({"eos_token_id": 2.5}, "eos_token_id must be"),
    ],
)
def test_configs_that_cannot_be_served(changes, saying, folder):
    refused(edit(folder, **changes), saying)


@pytest.mark.parametrize(
    ("content", "saying"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b'{"hidden_size": NaN}', "NaN"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "twice"),
        (b'{"a": ' + b"[" * 100_000, "nested|valid JSON"),
        (b"\xff\xfe{\0}\0", "not valid JSON"),
        (b" " * (1 << 20) + b"{}", "more than the 1048576"),
    ],
)
def test_configs_that_cannot_be_read(content, saying, folder):
    (folder / "config.json").write_bytes(content)
    refused(folder, saying)


def test_a_config_that_is_no_file(folder):
    (folder / "config.json").unlink()
    refused(folder, "no config.json")
    (folder / "config.json").mkdir()
    refused(folder, "not a regular file")
    (folder / "config.json").rmdir()
    os.mkfifo(folder / "config.json")
    refused(folder, "not a regular file")


def test_a_huge_config_is_not_read(folder):
    os.truncate(folder / "config.json", 1 << 40)  # sparse
    refused(folder, "1099511627776 bytes")


def test_a_tokenizer_larger_than_the_embedding_loads(folder):
    tokenizer = checkpoints.tiny_tokenizer()
    tokenizer.add_tokens([f"more{index}" for index in range(6)])
    tokenizer.save(str(folder / "tokenizer.json"))
    edit(folder, "tokenizer_config.json", eos_token="more5", pad_token="more4")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size) == (264, 260)
    assert checkpoint.tokenizer.encode("amore5", bos=False)[1:] == [263]
    assert checkpoint.stop_ids == {256}  # the model never produces 263


def test_a_token_added_beyond_the_embedding_loads(folder):
    """As in Llama 2's folders with a padding token."""
    (folder / "added_tokens.json").write_text(json.dumps({"<a>": 258, "<b>": 259, "<pad>": 260}))
    assert open_checkpoint(folder).tokenizer.encode("<pad>", bos=False) == [260]


def test_a_gguf_tokenizer_larger_than_the_embedding_loads(tied, tmp_path):
    more = [f"<unused{index}>" for index in range(6)]
    checkpoint = open_checkpoint(gguf_with_tokens(tmp_path / "x.gguf", tied, more))
    assert (checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size) == (264, 260)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 4968\n"
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
READ = [
    *["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"],
    *["tokenizer.model", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"],
]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(
    ("content", "saying"),
    [
        (POINTER, "is a Git-LFS pointer, .*`git lfs pull`"),
        (PAGE, "is an HTML page that was saved in place of the file; download it again"),
        (b"<html>", "is an HTML page"),
    ],
)
def test_what_a_download_left_in_place_of_a_file(name, content, saying, folder):
    (folder / name).write_bytes(content)
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    assert f"{name} is" in refused(folder, saying)


def test_a_pointer_that_is_not_read_is_left_alone(folder):
    (folder / "tokenizer.model").write_bytes(POINTER)
    (folder / "pytorch_model.bin").write_bytes(POINTER)
    assert open_checkpoint(folder).tokenizer.encode("th", bos=False) == [257]


@pytest.mark.parametrize(
    ("content", "saying"), [(POINTER, "is a Git-LFS pointer"), (PAGE, "is an HTML page")]
)
def test_what_a_download_left_in_place_of_a_single_file(content, saying, tmp_path):
    for name in ("model.gguf", "model.safetensors", "model.bin"):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, saying)


def test_a_shard_that_is_a_pointer(tied, tmp_path):
    checkpoints.save(tied, tmp_path, max_shard_size="20KB")
    shard = max(tmp_path.glob("model-*.safetensors"))
    shard.write_bytes(POINTER)
    assert shard.name in refused(tmp_path, "is a Git-LFS pointer")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(PAGE)
    assert index.name in refused(tmp_path, "is an HTML page")


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"architectures": ["MT5ForConditionalGeneration"]}, "AutoModelForSeq2SeqLM"),
        ({"architectures": ["T5WithLMHeadModel"]}, "AutoModelForSeq2SeqLM"),
        ({"is_encoder_decoder": True}, "AutoModelForSeq2SeqLM"),
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"is_encoder_decoder": False}, "AutoModelForCausalLM"),
        ({"architectures": 3}, "AutoModelForCausalLM"),
        (None, "AutoModelForCausalLM"),
    ],
)
def test_pickles_are_refused_with_the_class_that_converts_them(config, model, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\x03\x04")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(path, "pickle")
    assert f"{model}.from_pretrained(...).save_pretrained(...)" in message
    assert "AutoTokenizer.from_pretrained(...).save_pretrained(...)" in message


def test_a_folder_whose_tokenizer_is_in_other_files(folder):
    (folder / "tokenizer.json").rename(folder / "spiece.model")
    refused(folder, r"neither.*AutoTokenizer\.from_pretrained\(\.\.\.\)\.save_pretrained")


def test_tokenizers_that_cannot_be_read(folder):
    (folder / "tokenizer.json").write_text("{}")
    # The library says it in more than one sentence.
    with pytest.raises(CheckpointError, match=f"{folder}: tokenizer.json cannot be read") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    (folder / "tokenizer.json").unlink()
    refused(folder, "neither tokenizer.json nor tokenizer.model")


def test_files_that_are_no_models(tmp_path):
    for name, saying in [
        ("model.bin", "pickle.*save_pretrained"),
        ("model.pt", "pickle.*save_pretrained"),
        ("model.safetensors", "name its folder"),
        ("notes.txt", "neither a GGUF file nor"),
    ]:
        (tmp_path / name).write_bytes(b"\x80\x04N.")
        refused(tmp_path / name, saying)
    refused(tmp_path / "absent", "No such file")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "not a regular file")


def write_gguf_with(path, model, change):
    """The model's GGUF after change(tensors, writer)."""
    writer = checkpoints.gguf_writer(path, model.config)
    tensors = checkpoints.gguf_tensors(model)
    change(tensors, writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    return checkpoints.finish(writer, path)


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        (lambda t, w: t.pop("blk.1.ffn_up.weight"), "lacks tensor 'blk.1.ffn_up.weight'"),
        (lambda t, w: t.update(x=np.ones(3, np.float32)), "holds tensor 'x'"),
        (lambda t, w: t.update({"rope_freqs.weight": np.ones(4, np.float32)}), "rope_freqs.weight"),
        (
            lambda t, w: t.update({"blk.0.attn_q.bias": np.ones(60, np.float32)}),
            "lacks tensor 'blk.0.attn_k.bias'",
        ),
        (
            lambda t, w: t.update({"blk.0.attn_v.weight": np.ones((48, 20), np.float32)}),
            r"\[20, 48\], but has \[48, 20\]",
        ),
        (lambda t, w: w.add_rope_scaling_attn_factors(1.2), "attn_factor"),
        (lambda t, w: w.add_expert_count(8), "expert_count"),
    ],
)
def test_gguf_files_that_cannot_be_served(change, saying, tied, tmp_path):
    refused(write_gguf_with(tmp_path / "x.gguf", tied, change), saying)


def test_gguf_weights_that_are_not_finite(tied, tmp_path):
    def change(tensors, writer):
        tensors["blk.1.ffn_up.weight"][0, 0] = np.nan

    path = write_gguf_with(tmp_path / "x.gguf", tied, change)
    refused_at_load(path, "blk.1.ffn_up.weight holds weights that are not finite")


def test_another_architecture_in_gguf(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "bert")
    refused(
        checkpoints.finish(writer, tmp_path / "x.gguf"), r"'bert'; supported are .*llama, .*qwen2"
    )


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes_in_gguf(seed, gguf_path):
    """Damage anywhere before the weights is refused in a sentence, or loads finite weights."""
    rng = random.Random(seed)
    raw = bytearray(gguf_path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(6000)] = rng.randrange(256)
    gguf_path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(gguf_path)
        decoder = loaded(checkpoint, context=16)
        assert all(parameter.isfinite().all() for parameter in parameters_of(decoder).values())
    except CheckpointError as error:
        assert str(gguf_path) in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_in_config(seed, folder):
    rng = random.Random(seed)
    raw = bytearray((folder / "config.json").read_bytes())
    for _ in range(rng.randint(1, 2)):
        raw[rng.randrange(len(raw))] = rng.randrange(32, 127)
    (folder / "config.json").write_bytes(raw)
    try:
        loaded(open_checkpoint(folder), context=16)
    except CheckpointError as error:
        assert str(folder) in str(error)
        assert "\n" not in str(error)
