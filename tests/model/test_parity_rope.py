"""Rotary models of every scaling and shape against transformers, through both formats."""

import copy
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.executor import Kind
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import checkpoints, test_parity
from tests.model.checkpoints import COMMON, llama, loaded, mistral, qwen2, qwen3
from tests.model.test_parity import greedy, prompts, ragged_logits, reference_greedy
from tests.model.tiny import on_kernels, parameters_of

ORIGINAL = 16  # every test runs to four times this length or more
CONTEXT = 96
TOLERANCE = 1e-4


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 150.0, **parameters}}


def factors(pairs, slowest):
    return [1.0 + slowest * pair / pairs for pair in range(pairs)]


def longrope(pairs, **parameters):
    lists = {"short_factor": factors(pairs, 1.0), "long_factor": factors(pairs, 9.0)}
    return rope("longrope", **lists, original_max_position_embeddings=ORIGINAL, **parameters)


YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 2.5}
BANDS = {"factor": 8.0, "low_freq_factor": 0.4, "high_freq_factor": 2.0}


def phi3(**changes):
    """Two key heads for six query heads."""
    shape = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "original_max_position_embeddings": ORIGINAL}
    return transformers.Phi3Config(**COMMON | shape | more | changes)


def smollm3(**changes):
    """Odd numbers of layers and heads."""
    shape = {"hidden_size": 50, "intermediate_size": 56, "num_attention_heads": 5}
    more = {"num_key_value_heads": 1, "num_hidden_layers": 5}
    return transformers.SmolLM3Config(**COMMON | shape | more | changes)


MODELS = {
    "llama-linear": llama(**rope("linear", factor=3.0)),
    "llama-llama3": llama(
        **rope("llama3", **BANDS, original_max_position_embeddings=ORIGINAL), head_dim=16
    ),
    "llama-yarn-weights": llama(**rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.2)),
    "llama-proportional": llama(**rope("proportional", partial_rotary_factor=0.5, factor=2.0)),
    "mistral-yarn-window": mistral(**rope("yarn", **YARN), sliding_window=19),
    "qwen2-yarn-recipe": qwen2(**rope("yarn", **YARN), max_position_embeddings=ORIGINAL),
    "qwen3-yarn-said": qwen3(**rope("yarn", **YARN, attention_factor=1.3, truncate=False)),
    "phi3": phi3(),
    "phi3-window-tied": phi3(sliding_window=18, tie_word_embeddings=True, num_key_value_heads=6),
    "phi3-partial": phi3(**rope("default", partial_rotary_factor=0.5), num_key_value_heads=1),
    "smollm3": smollm3(),
    "smollm3-named-layers": smollm3(no_rope_layers=[0, 1, 0, 0, 1], tie_word_embeddings=False),
    "smollm3-interval-windows": smollm3(
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=17,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=5,
    ),
    "smollm3-yarn": smollm3(**rope("yarn", **YARN)),
    "smollm3-unrotated": smollm3(no_rope_layers=[0] * 5),
}
FOLLOWING = {  # by length, and where their frequencies change
    "llama-dynamic": (llama(**rope("dynamic", factor=2.0), max_position_embeddings=24), 24),
    "qwen2-dynamic": (qwen2(**rope("dynamic", factor=5.0), max_position_embeddings=17), 17),
    "llama-longrope": (llama(**longrope(5), max_position_embeddings=64), ORIGINAL),
    "llama-longrope-factor": (llama(**longrope(5, factor=16.0)), ORIGINAL),
    "phi3-longrope": (phi3(**longrope(4), max_position_embeddings=64), ORIGINAL),
    "phi3-longrope-partial": (
        phi3(
            **longrope(3, partial_rotary_factor=0.75),
            max_position_embeddings=128,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        ORIGINAL,
    ),
}


def saved(config, folder):
    model = checkpoints.random_model(copy.deepcopy(config))
    return model, open_checkpoint(checkpoints.save(model, folder))


def rewritten(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return open_checkpoint(folder)


@torch.no_grad()
def fresh_logits(model, tokens):
    """From a model that has seen no other sequence: frequencies remember the longest one."""
    unused = model.base_model.rotary_emb
    model.base_model.rotary_emb = copy.deepcopy(unused)
    logits = model(torch.tensor([tokens])).logits[0]
    model.base_model.rotary_emb = unused
    return logits


difference = partial(test_parity.difference, logits=fresh_logits)


@pytest.mark.parametrize("name", MODELS)
def test_safetensors(name, tmp_path):
    model, checkpoint = saved(MODELS[name], tmp_path)
    assert difference(loaded(checkpoint, context=CONTEXT), model, 75, 3, 1, 40) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2-yarn-recipe", "phi3-partial", "smollm3"])
def test_older_spelling(name, tmp_path):
    def to_older(values):
        section = values.pop("rope_parameters")
        section["type"] = section.pop("rope_type")
        values["rope_theta"] = section.pop("rope_theta")
        if "partial_rotary_factor" in section:
            values["partial_rotary_factor"] = section.pop("partial_rotary_factor")
        values["rope_scaling"] = None if section["type"] == "default" else section

    _, checkpoint = saved(MODELS[name], tmp_path)
    assert rewritten(tmp_path, to_older).config == checkpoint.config


@pytest.mark.parametrize("name", FOLLOWING)
def test_within_the_boundary(name, tmp_path):
    config, boundary = FOLLOWING[name]
    model, checkpoint = saved(config, tmp_path)
    decoder = loaded(checkpoint, context=boundary)
    assert difference(decoder, model, 1, boundary, boundary - 1, 5) <= TOLERANCE


@pytest.mark.parametrize("name", FOLLOWING)
def test_past_the_boundary(name, tmp_path):
    """The served context says which frequencies: longrope has two sets, dynamic one a length."""
    config, boundary = FOLLOWING[name]
    model, checkpoint = saved(config, tmp_path)
    longest = 4 * ORIGINAL + 9
    for length in (boundary + 1, longest):
        decoder = loaded(checkpoint, context=length)
        assert difference(decoder, model, length, length) <= TOLERANCE
    if "longrope" in name:
        assert difference(decoder, model, longest, boundary + 1, boundary + 7) <= TOLERANCE
    # The other side's frequencies would be noticed.
    within = loaded(checkpoint, context=boundary)
    sides = [
        ragged_logits(one, prompts(model.config.vocab_size, boundary))[0]
        for one in (within, decoder)
    ]
    assert (sides[0] - sides[1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["mistral-yarn-window", "phi3-window-tied", "smollm3"])
def test_greedy(name, tmp_path):
    """One step each from the cache, past any window."""
    model, checkpoint = saved(MODELS[name], tmp_path)
    prompt = prompts(model.config.vocab_size, 9)[0]
    ours = greedy(loaded(checkpoint, context=CONTEXT), prompt, 32)
    assert ours == reference_greedy(model, prompt, 32)


@pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope-partial"])
def test_greedy_past_the_boundary(name, tmp_path):
    model, checkpoint = saved(FOLLOWING[name][0], tmp_path)
    decoder = loaded(checkpoint, context=CONTEXT)
    prompt = prompts(model.config.vocab_size, ORIGINAL + 1)[0]
    assert greedy(decoder, prompt, 32) == reference_greedy(model, prompt, 32)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_first_names_of_longrope(kind, tmp_path):
    """As Phi-3 was published: the type's first name, lists outside of any rope_theta."""

    def to_first(values):
        section = values.pop("rope_parameters")
        values["rope_theta"] = section.pop("rope_theta")
        del section["original_max_position_embeddings"], section["rope_type"]
        del section["partial_rotary_factor"]
        values["rope_scaling"] = section | {"type": kind}
        values["auto_map"] = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}

    _, checkpoint = saved(FOLLOWING["phi3-longrope"][0], tmp_path)
    assert rewritten(tmp_path, to_first).config == checkpoint.config


def linear_in_gguf(writer):
    writer.add_rope_scaling_type(checkpoints.gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(3.0)


def yarn_in_gguf(writer):
    writer.add_rope_scaling_type(checkpoints.gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
    writer.add_rope_scaling_yarn_beta_fast(2.5)


def phi3_in_gguf(**attention):
    def add(writer):
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        writer.add_sliding_window(attention.get("window", 0))
        writer.add_rope_dimension_count(attention.get("width", 8))
        if "magnitude" in attention:
            writer.add_rope_scaling_attn_factors(attention["magnitude"])

    return add


def llama3_divisors(head_dim):
    """Theirs, from the frequencies of transformers with and without the scaling."""
    config = MODELS["llama-llama3"]
    scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    plain = 150.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


IN_GGUF = {
    "llama-linear": (linear_in_gguf, {}),
    "qwen2-yarn-recipe": (yarn_in_gguf, {}),
    "llama-llama3": (None, {"rope_freqs.weight": llama3_divisors(16)}),
    "phi3": (phi3_in_gguf(), {}),
    "phi3-window-tied": (phi3_in_gguf(window=18), {}),
    "phi3-partial": (phi3_in_gguf(width=4), {}),
    "smollm3": (None, {}),
}


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf(name, tmp_path):
    model = checkpoints.random_model(copy.deepcopy(MODELS[name]))
    metadata, tensors = IN_GGUF[name]
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", model, metadata=metadata, tensors=tensors)
    decoder = loaded(open_checkpoint(path), context=CONTEXT)
    assert difference(decoder, model, 66, 1, 20) <= TOLERANCE


@pytest.mark.parametrize("name", ["phi3-longrope", "phi3-longrope-partial"])
def test_longrope_in_gguf(name, tmp_path):
    """The lists are tensors, and the magnitude is stored."""
    config, boundary = FOLLOWING[name]
    model = checkpoints.random_model(copy.deepcopy(config))
    lists = {
        f"rope_factors_{kind}.weight": np.float32(config.rope_parameters[f"{kind}_factor"])
        for kind in ("short", "long")
    }
    magnitude = model.model.rotary_emb.attention_scaling
    metadata = phi3_in_gguf(width=2 * len(lists["rope_factors_long.weight"]), magnitude=magnitude)
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", model, metadata=metadata, tensors=lists)
    checkpoint = open_checkpoint(path)
    assert magnitude > 1.1
    for context, lengths in ((boundary, (1, 16, 7)), (70, (70, 17))):
        decoder = loaded(checkpoint, context=context)
        assert difference(decoder, model, *lengths) <= TOLERANCE


@pytest.mark.parametrize("name", ["smollm3-named-layers", "llama-yarn-weights"])
def test_kernels(name, tmp_path, kernels):
    """Substituted where a layer turns, and left alone where none does."""
    model, checkpoint = saved(MODELS[name], tmp_path)
    decoder = on_kernels(loaded(checkpoint, context=CONTEXT), kernels)
    layers = decoder.config.layers
    turning = decoder.config.encoding.options.get("layers", range(layers))
    lowered = decoder.executor._answers
    assert [op.kind for op in lowered.ops].count(Kind.TURN) == len(turning)
    assert len(lowered.stages) == 1
    for index in range(layers):
        assert isinstance(decoder.encoding.for_layer(index), RoPE) == (index in turning)
    assert difference(decoder, model, 66, 1, 20) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn-weights", "smollm3-yarn"])
def test_interleaved_layout(name, tmp_path):
    """The same model with q and k rows in pairs, which the interleaved layout turns alike."""
    model, checkpoint = saved(MODELS[name], tmp_path)
    options = checkpoint.config.encoding.options | {"layout": "interleaved"}
    changed = replace(checkpoint.config, encoding=EncodingSpec("rope", options))
    decoder = loaded(replace(checkpoint, config=changed), context=CONTEXT)
    rows = (changed.heads + changed.kv_heads) * changed.head_dim
    for layer in range(changed.layers):
        weight = parameters_of(decoder)[f"layers.{layer}.attention.qkv.weight"]
        halves = weight[:rows].reshape(-1, 2, changed.head_dim // 2, changed.width)
        weight[:rows] = halves.transpose(1, 2).reshape(rows, changed.width)
    assert difference(decoder, model, 66, 1, 20) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3-yarn-said"])
def test_bfloat16_leaves_the_angles_alone(name, tmp_path):
    _, checkpoint = saved(MODELS[name], tmp_path)
    exact = loaded(checkpoint, context=CONTEXT).encoding
    for encoding in (
        loaded(checkpoint, torch.bfloat16, context=CONTEXT).encoding,
        loaded(checkpoint, context=CONTEXT).encoding.to(torch.bfloat16),
    ):
        assert encoding.cos.dtype is encoding.sin.dtype is torch.float32
        assert torch.equal(encoding.cos, exact.cos)
        assert torch.equal(encoding.sin, exact.sin)
