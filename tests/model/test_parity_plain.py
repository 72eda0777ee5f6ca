"""Families with layer norms and without gates, against transformers: every encoding but T5's."""

import copy
import json

import gguf
import pytest
from safetensors.torch import load_file, save_file

from ropewalk.model.attention.reference import ReferenceAttention
from ropewalk.model.kernels.cpu.attention import CpuBackend
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from tests.model import checkpoints, plain
from tests.model.plain import bloom, falcon, gpt2, gpt_neox, gptj, mpt, opt, xglm
from tests.model.test_parity import check_greedy, difference, prompts
from tests.model.tiny import on_kernels

MODELS = {
    "bloom": bloom(),
    "bloom-eight-heads": bloom(n_head=4, n_layer=1, tie_word_embeddings=False),
    "mpt": mpt(),
    "mpt-bias-max": mpt({"alibi_bias_max": 5, "clip_qkv": 0.6, "softmax_scale": 0.4}),
    "falcon": falcon(),
    "falcon-no-bias": falcon(bias=False, num_attention_heads=8, ffn_hidden_size=50),
    "gpt2": gpt2(),
    "gpt2-inner": gpt2(n_inner=50, scale_attn_weights=False, activation_function="relu"),
    "gpt2-untied": gpt2(n_head=1, tie_word_embeddings=False),
    "opt": opt(),
    "opt-350m": opt(do_layer_norm_before=False, word_embed_proj_dim=20),
    "opt-no-bias": opt(enable_bias=False, activation_function="gelu"),
    "xglm": xglm(),
    "xglm-unscaled": xglm(scale_embedding=False, attention_heads=2),
    "gpt-neox": gpt_neox(),
    "gpt-neox-sequential": gpt_neox(use_parallel_residual=False, hidden_act="gelu_new"),
    "gpt-neox-no-bias": gpt_neox(attention_bias=False, num_attention_heads=6),
    "gptj": gptj(),
    "gptj-whole-head": gptj(rotary_dim=16, n_inner=50),
}
CONTEXT = 256


def saved(model, folder):
    return open_checkpoint(checkpoints.save(model, folder))


def check(decoder, model, lengths, count=8):
    assert difference(decoder, model, *lengths) <= 2e-4
    check_greedy(decoder, model, prompts(model.config.vocab_size, *lengths)[2], count)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path):
    """Lengths up to four times the trained context where the encoding has no table of it."""
    model = plain.random_model(copy.deepcopy(MODELS[name]))
    checkpoint = saved(model, tmp_path)
    decoder = checkpoints.loaded(checkpoint, context=CONTEXT)
    check(decoder, model, (1, 160, 17, 2, 64), 8 if "-" in name else 32)


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt2", "gptj", "xglm"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_backend(name, backend, tmp_path, kernels):
    model = plain.random_model(copy.deepcopy(MODELS[name]))
    backend = {"reference": ReferenceAttention, "cpu": CpuBackend(kernels)}[backend]
    check(
        checkpoints.loaded(saved(model, tmp_path), context=CONTEXT, backend=backend),
        model,
        (3, 70, 17),
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_in_one_call(name, tmp_path, kernels):
    model = plain.random_model(copy.deepcopy(MODELS[name]))
    decoder = on_kernels(checkpoints.loaded(saved(model, tmp_path), context=CONTEXT), kernels)
    assert len(decoder.executor._answers.stages) == 1
    check(decoder, model, (1, 150, 17, 2, 64))


@pytest.mark.parametrize(
    ("name", "prefix"), [("bloom", "transformer."), ("gpt2", "transformer."), ("opt", "model.")]
)
def test_files_of_the_bare_model(name, prefix, tmp_path):
    """The first ones of these families were published without the prefix and the head."""
    model = plain.random_model(copy.deepcopy(MODELS[name]))
    checkpoints.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    assert tensors.keys() != load_file(file).keys()
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file)
    check(checkpoints.loaded(open_checkpoint(tmp_path), context=CONTEXT), model, (3, 70, 17))


def test_older_spellings(tmp_path):
    """Of BLOOM's shape and GPT-NeoX's rotation, as published."""
    for config, older in (
        (bloom(), {"n_embed": 36, "num_attention_heads": 6, "seq_length": 64}),
        (gpt_neox(), {"rotary_pct": 0.25, "rotary_emb_base": 1234.0}),
    ):
        folder = tmp_path / config.model_type
        model = plain.random_model(config)
        checkpoints.save(model, folder)
        description = json.loads((folder / "config.json").read_text())
        for name in ("hidden_size", "n_head", "rope_parameters"):
            if config.model_type == "bloom" or name == "rope_parameters":
                description.pop(name, None)
        (folder / "config.json").write_text(json.dumps(description | older))
        check(checkpoints.loaded(open_checkpoint(folder), context=CONTEXT), model, (3, 70, 17))


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
    checkpoints.save(plain.random_model(config), tmp_path)
    with pytest.raises(CheckpointError, match=saying):
        open_checkpoint(tmp_path)


def gpt2_in_gguf(path, model):
    """As converters write it: matrices the usual way round, positions beside the embedding."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    checkpoints.add_tokenizer(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        values = (tensor.t() if linear else tensor).contiguous().numpy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    return checkpoints.finish(writer, path)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_in_gguf(tied, tmp_path):
    model = plain.random_model(gpt2(tie_word_embeddings=tied, n_inner=50))
    checkpoint = open_checkpoint(gpt2_in_gguf(tmp_path / "tiny.gguf", model))
    assert checkpoint.config.trained_context == 160
    check(checkpoints.loaded(checkpoint), model, (1, 160, 17))
