"""GPT-NeoX and GPT-J against transformers, far past the trained length, through both formats."""

import copy

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from tests.model import checkpoints, plain
from tests.model.test_parity import check_greedy, difference, prompts

TRAINED = 40
CONTEXT = 4 * TRAINED + 8  # what is served
TOLERANCE = 1e-4
LENGTHS = (1, 4 * TRAINED + 3, 17, 2, TRAINED)


def neox(*, share=0.25, scaling=None, **changes):
    """share: how much of each head turns."""
    rope = {"rope_type": "default", "rope_theta": 1234.0, "partial_rotary_factor": share}
    usual = {"max_position_embeddings": TRAINED, "rope_parameters": rope | (scaling or {})}
    return plain.gpt_neox(**usual | changes)


def gptj(**changes):
    return plain.gptj(**{"n_positions": TRAINED} | changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
MODELS = {
    "neox-odd-heads": neox(hidden_size=45, share=0.4, intermediate_size=31),
    "neox-one-head": neox(hidden_size=22, num_attention_heads=1, share=1.0, hidden_act="relu"),
    "neox-sequential": neox(use_parallel_residual=False, hidden_act="gelu_fast", share=0.5),
    "neox-no-bias": neox(attention_bias=False, num_attention_heads=12, share=0.5),
    "neox-tied": neox(tie_word_embeddings=True, num_hidden_layers=1, layer_norm_eps=1e-3),
    "neox-linear": neox(share=0.75, scaling={"rope_type": "linear", "factor": 3.0}),
    "neox-yarn": neox(share=0.5, scaling=YARN),
    "gptj-one-pair": gptj(rotary_dim=2, num_hidden_layers=1, n_inner=31),
    "gptj-one-head": gptj(n_embd=22, n_head=1, rotary_dim=22, activation_function="relu"),
    "gptj-odd-heads": gptj(n_embd=45, rotary_dim=14, layer_norm_epsilon=1e-3),
    "gptj-many-heads": gptj(n_head=8, rotary_dim=4, activation_function="gelu"),
    "gptj-tied": gptj(tie_word_embeddings=True),
}
IN_GGUF = {  # with the activation that the format stands for
    "neox-odd-heads": MODELS["neox-odd-heads"],
    "neox-sequential": neox(use_parallel_residual=False, share=0.5, num_attention_heads=6),
    "neox-tied": MODELS["neox-tied"],
    "gptj-odd-heads": MODELS["gptj-odd-heads"],
    "gptj-tied": MODELS["gptj-tied"],
}


def random_model(config):
    return plain.random_model(copy.deepcopy(config))


def stretched(model):
    """The same weights in transformers, whose GPT-J looks its angles up in a table."""
    if model.config.model_type != "gptj":
        return model
    config = copy.deepcopy(model.config)
    config.n_positions = CONTEXT
    longer = transformers.GPTJForCausalLM(config).eval()
    longer.load_state_dict(model.state_dict())
    return longer


def check(decoder, model, lengths=LENGTHS, count=12):
    """Logits of a ragged batch, and tokens from the cache that run past the trained context."""
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
    count = 48 if name in ("neox-odd-heads", "gptj-odd-heads") else 12
    check(checkpoints.loaded(checkpoint, context=CONTEXT), model, count=count)


@pytest.mark.parametrize("name", ["neox-odd-heads", "neox-sequential", "gptj-odd-heads"])
def test_the_kernels(name, tmp_path, kernels):
    model = random_model(MODELS[name])
    checkpoint = open_checkpoint(checkpoints.save(model, tmp_path))
    check(checkpoints.loaded(checkpoint, context=CONTEXT, backend=CpuBackend(kernels)), model)


def test_parity_would_show_a_wrong_rotation(tmp_path):
    """Which coordinates turn with which matters to the logits."""
    for name, other in (("neox-odd-heads", {"width": 4}), ("gptj-odd-heads", {"layout": "half"})):
        model = random_model(MODELS[name])
        checkpoint = open_checkpoint(checkpoints.save(model, tmp_path / name))
        checkpoint.config.encoding.options.update(other)
        with pytest.raises(AssertionError):
            check(checkpoints.loaded(checkpoint, context=CONTEXT), model)


def rewrite(folder, change):
    """Store what `change` makes of the tensors instead."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


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
    model = random_model({"neox": neox, "gptj": gptj}[name]())
    checkpoints.save(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | derived(name))
    check(checkpoints.loaded(open_checkpoint(tmp_path), context=CONTEXT), model, (3, 50), 8)


@pytest.mark.parametrize(
    "name", ["gpt_neox.layers.0.attention.scale", "transformer.h.0.attn.scale"]
)
def test_other_tensors_are_refused(name, tmp_path):
    model = random_model(neox() if "neox" in name else gptj())
    checkpoints.save(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=f"holds tensor '{name}'"):
        open_checkpoint(tmp_path)


def renamed(tensors):
    """The head as transformers calls it in memory."""
    assert "embed_out.weight" in tensors
    return {
        "lm_head.weight" if name == "embed_out.weight" else name: tensor
        for name, tensor in tensors.items()
    }


def test_both_names_of_the_head(tmp_path):
    """transformers writes the one of the published files, or the other when told to."""
    model = random_model(neox())
    for folder in ("renamed", "written"):
        if folder == "renamed":
            checkpoints.save(model, tmp_path / folder)
            rewrite(tmp_path / folder, renamed)
        else:
            checkpoints.save(model, tmp_path / folder, save_original_format=False)
        assert "lm_head.weight" in load_file(tmp_path / folder / "model.safetensors")
        decoder = checkpoints.loaded(open_checkpoint(tmp_path / folder), context=CONTEXT)
        check(decoder, model, (3, 50), 8)


@pytest.mark.parametrize("head", ["embed_out.weight", "lm_head.weight"])
def test_a_tied_head_beside_the_embedding(head, tmp_path):
    model = random_model(neox(tie_word_embeddings=True))
    embedding = model.gpt_neox.embed_in.weight.detach()
    checkpoints.save(model, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {head: embedding.clone()})
    check(checkpoints.loaded(open_checkpoint(tmp_path), context=CONTEXT), model, (3, 50), 8)
    rewrite(tmp_path, lambda tensors: tensors | {head: embedding + 1})
    with pytest.raises(CheckpointError, match=rf"{head} should be tied to gpt_neox\.embed_in"):
        checkpoints.loaded(open_checkpoint(tmp_path), context=CONTEXT)


# ---------------------------------------------------------------------------------- GGUF


def gguf_tensors(model):
    """{GGUF name: array}, under the names of the gguf package.

    llama.cpp's converter takes GPT-NeoX's q, k and v apart, which lie head by head, and stores
    all of q, then all of k, then all of v.
    """
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if "query_key_value" in name:
            by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
            values = np.concatenate(
                [part.reshape(-1, *values.shape[1:]) for part in by_head.swapaxes(0, 1)]
            )
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


ARCHITECTURES = {"gpt_neox": gguf.MODEL_ARCH.GPTNEOX, "gptj": gguf.MODEL_ARCH.GPTJ}


def write_gguf(path, model):
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])
    writer.add_context_length(TRAINED)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt_neox":
        rope = config.rope_parameters
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_parallel_residual(config.use_parallel_residual)
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    checkpoints.add_tokenizer(writer, config.vocab_size)
    for name, values in gguf_tensors(model).items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    return checkpoints.finish(writer, path)


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf(name, tmp_path):
    model = random_model(IN_GGUF[name])
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    assert checkpoint.config.trained_context == TRAINED
    assert checkpoint.config.tied_embeddings is name.endswith("tied")
    check(checkpoints.loaded(checkpoint, context=CONTEXT), model)
