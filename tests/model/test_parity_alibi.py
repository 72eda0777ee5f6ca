"""Models with ALiBi against transformers, far past the trained length, through both formats."""

import copy
from dataclasses import replace

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ropewalk.model.config import EncodingSpec
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from tests.model import checkpoints, plain
from tests.model.test_parity import check_greedy, difference, prompts

TRAINED = 40
CONTEXT = 400  # what is served
TOLERANCE = 1e-4
LENGTHS = (1, 4 * TRAINED + 3, 17, 2, TRAINED)


def bloom(**changes):
    return plain.bloom(**{"seq_length": TRAINED} | changes)


def mpt(attn_config=None, **changes):
    return plain.mpt(attn_config, **{"max_seq_len": TRAINED} | changes)


def falcon(**changes):
    return plain.falcon(**{"max_position_embeddings": TRAINED} | changes)


MODELS = {
    "bloom-12-heads": bloom(n_head=12),
    "bloom-5-odd-heads": bloom(n_head=5, hidden_size=35, n_layer=1),
    "bloom-16-heads-untied": bloom(n_head=16, hidden_size=64, tie_word_embeddings=False),
    "bloom-1-head": bloom(n_head=1, hidden_size=10, layer_norm_epsilon=1e-3),
    "mpt-6-odd-heads": mpt(n_heads=6, d_model=30, n_layers=1),
    "mpt-8-heads-untied": mpt(n_heads=8, d_model=32, tie_word_embeddings=False),
    "mpt-7-heads-clipped": mpt({"clip_qkv": 0.7, "softmax_scale": 0.6}, n_heads=7, d_model=42),
    "mpt-5-heads-steep": mpt({"alibi_bias_max": 16}, n_heads=5, d_model=40),
    "falcon-12-heads": falcon(num_attention_heads=12),
    "falcon-5-heads": falcon(num_attention_heads=5, hidden_size=50, num_hidden_layers=1),
    "falcon-8-heads-untied": falcon(
        num_attention_heads=8, tie_word_embeddings=False, bias=False, activation="relu"
    ),
}
LONG = ("bloom-12-heads", "mpt-6-odd-heads", "falcon-8-heads-untied")  # answers, one by family
IN_GGUF = [name for name in MODELS if not name.startswith("falcon") and "clipped" not in name]


def random_model(config):
    """In transformers, whose MPT has no bias for sequences longer than max_seq_len."""
    return plain.random_model(copy.deepcopy(config))


def stretched(model):
    """The same model, able to see more keys than it was trained on."""
    if model.config.model_type == "mpt":
        model.config.max_seq_len = CONTEXT
    return model


def check(decoder, model, lengths=LENGTHS, count=12):
    """Logits, and tokens from the cache that run past the trained context."""
    model = stretched(model)
    assert difference(decoder, model, *lengths) <= TOLERANCE
    (prompt,) = prompts(model.config.vocab_size, TRAINED - 7)
    check_greedy(decoder, model, prompt, count)


# --------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("name", MODELS)
def test_safetensors(name, tmp_path):
    model = random_model(MODELS[name])
    checkpoint = open_checkpoint(checkpoints.save(model, tmp_path))
    assert checkpoint.config.trained_context == TRAINED
    decoder = checkpoints.loaded(checkpoint, context=CONTEXT)
    check(decoder, model, count=64 if name in LONG else 12)


@pytest.mark.parametrize("name", ["bloom-12-heads", "mpt-7-heads-clipped", "falcon-12-heads"])
def test_the_kernels(name, tmp_path, kernels):
    model = random_model(MODELS[name])
    checkpoint = open_checkpoint(checkpoints.save(model, tmp_path))
    check(checkpoints.loaded(checkpoint, context=CONTEXT, backend=CpuBackend(kernels)), model)


def test_falcon_needs_its_rounding_at_long_range(tmp_path):
    """From position 256 on, bfloat16 has no room for every position."""
    model = random_model(MODELS["falcon-12-heads"])
    checkpoint = open_checkpoint(checkpoints.save(model, tmp_path))
    exact = checkpoints.loaded(checkpoint, context=CONTEXT)
    assert difference(exact, model, 390, 300) <= TOLERANCE
    by_distance = EncodingSpec("alibi", {"scaled": True})
    config = replace(checkpoint.config, encoding=by_distance)
    other = checkpoints.loaded(replace(checkpoint, config=config), context=CONTEXT)
    assert difference(other, model, 390) > 100 * TOLERANCE


def as_bare_model(folder, head):
    """As the first BLOOMs were published; with the head, as some copies of them are."""
    file = folder / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(file).items()
        if name != "lm_head.weight"
    }
    save_file(tensors if head is None else tensors | {"lm_head.weight": head}, file)


@pytest.mark.parametrize("with_head", [False, True])
def test_bloom_without_prefix(with_head, tmp_path):
    model = random_model(MODELS["bloom-12-heads"])
    checkpoints.save(model, tmp_path)
    as_bare_model(tmp_path, model.lm_head.weight.detach().clone() if with_head else None)
    check(checkpoints.loaded(open_checkpoint(tmp_path), context=CONTEXT), model)


def test_bloom_without_prefix_and_a_head_of_its_own(tmp_path):
    model = random_model(MODELS["bloom-12-heads"])
    checkpoints.save(model, tmp_path)
    as_bare_model(tmp_path, model.lm_head.weight.detach() + 1)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight should be tied to word_embeddings"):
        checkpoints.loaded(open_checkpoint(tmp_path), context=CONTEXT)


# ---------------------------------------------------------------------------------- GGUF


def gguf_tensors(model):
    """{GGUF name: array}, under the names of the gguf package and in llama.cpp's order."""
    config = model.config
    arch = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if config.model_type == "bloom":
            name = name.removeprefix("transformer.")
            if "query_key_value" in name:  # one after the other instead of head by head
                by_head = values.reshape(config.n_head, 3, -1, *values.shape[1:])
                values = np.concatenate(
                    [by_head[:, i].reshape(-1, *values.shape[1:]) for i in range(3)]
                )
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def write_gguf(path, model, metadata=None, tensors=()):
    """metadata: called with the writer, to add more. tensors: more of them, by name."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(TRAINED)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if config.model_type == "bloom":
        writer.add_head_count_kv(config.n_head)
    else:
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        if config.attn_config.clip_qkv is not None:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
    if metadata is not None:
        metadata(writer)
    checkpoints.add_tokenizer(writer, config.vocab_size)
    for name, values in {**gguf_tensors(model), **dict(tensors)}.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    return checkpoints.finish(writer, path)


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf(name, tmp_path):
    model = random_model(MODELS[name])
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    assert checkpoint.config.trained_context == TRAINED
    check(checkpoints.loaded(checkpoint, context=CONTEXT), model)


def test_a_clipped_mpt_in_gguf(tmp_path):
    model = random_model(mpt({"clip_qkv": 0.5}))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    check(checkpoints.loaded(checkpoint, context=CONTEXT), model)


def test_an_mpt_with_biases_in_gguf_is_refused(tmp_path):
    model = random_model(mpt())
    extra = {"blk.0.attn_output.bias": np.ones(36, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", model, tensors=extra)
    with pytest.raises(CheckpointError, match=r"holds tensor 'blk\.0\.attn_output\.bias'"):
        open_checkpoint(path)
