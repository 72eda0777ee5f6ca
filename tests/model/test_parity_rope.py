"""Rotary models whose frequencies follow the length, and what a rotation is made of."""

from dataclasses import replace

import pytest
import torch

from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.cpu.lowering import Kind
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import checkpoints
from tests.model.checkpoints import llama, loaded, phi3, qwen2
from tests.model.families import FAMILIES, ORIGINAL, rope
from tests.model.test_parity import (
    difference,
    drawn,
    greedy,
    prompts,
    ragged_logits,
    reference_greedy,
)
from tests.model.test_parity_files import with_description
from tests.model.tiny import on_kernels, parameters_of

CONTEXT = 96
TOLERANCE = 1e-4


def factors(pairs, slowest):
    return [1.0 + slowest * pair / pairs for pair in range(pairs)]


def longrope(pairs, **parameters):
    lists = {"short_factor": factors(pairs, 1.0), "long_factor": factors(pairs, 9.0)}
    return rope("longrope", **lists, original_max_position_embeddings=ORIGINAL, **parameters)


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
    model = drawn(config)
    return model, open_checkpoint(checkpoints.save(model, folder))


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
    with_description(tmp_path, to_first)
    assert open_checkpoint(tmp_path).config == checkpoint.config


@pytest.mark.parametrize("name", ["phi3-longrope", "phi3-longrope-partial"])
def test_longrope_in_gguf(name, tmp_path):
    """The lists are tensors, and the magnitude is stored."""
    config, boundary = FOLLOWING[name]
    model = drawn(config)
    checkpoint = open_checkpoint(checkpoints.write_gguf(tmp_path / "tiny.gguf", model))
    assert model.model.rotary_emb.attention_scaling > 1.1
    for context, lengths in ((boundary, (1, 16, 7)), (70, (70, 17))):
        decoder = loaded(checkpoint, context=context)
        assert difference(decoder, model, *lengths) <= TOLERANCE


@pytest.mark.parametrize("name", ["smollm3-named-layers", "llama-yarn-weights"])
def test_kernels(name, tmp_path, kernels):
    """Substituted where a layer turns, and left alone where none does."""
    model, checkpoint = saved(FAMILIES[name].config, tmp_path)
    decoder = on_kernels(loaded(checkpoint, context=CONTEXT), kernels)
    layers = decoder.config.num_layers
    turning = decoder.config.encoding.options.get("layers", range(layers))
    lowered = decoder.executor._answers
    assert [op.kind for op in lowered.ops].count(Kind.ROTATE) == len(turning)
    assert len(lowered.stages) == 1
    for index in range(layers):
        assert isinstance(decoder.encoding.for_layer(index), RoPE) == (index in turning)
    assert difference(decoder, model, 66, 1, 20) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn-weights", "smollm3-yarn"])
def test_interleaved_layout(name, tmp_path):
    """The same model with q and k rows in pairs, which the interleaved layout turns alike."""
    model, checkpoint = saved(FAMILIES[name].config, tmp_path)
    options = checkpoint.config.encoding.options | {"layout": "interleaved"}
    changed = replace(checkpoint.config, encoding=EncodingSpec("rope", options))
    decoder = loaded(replace(checkpoint, config=changed), context=CONTEXT)
    rows = (changed.num_heads + changed.num_kv_heads) * changed.head_dim
    for layer in range(changed.num_layers):
        weight = parameters_of(decoder)[f"layers.{layer}.attention.qkv.weight"]
        halves = weight[:rows].reshape(-1, 2, changed.head_dim // 2, changed.hidden_size)
        weight[:rows] = halves.transpose(1, 2).reshape(rows, changed.hidden_size)
    assert difference(decoder, model, 66, 1, 20) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3-yarn-said"])
def test_bfloat16_leaves_the_angles_alone(name, tmp_path):
    _, checkpoint = saved(FAMILIES[name].config, tmp_path)
    exact = loaded(checkpoint, context=CONTEXT).encoding
    for encoding in (
        loaded(checkpoint, torch.bfloat16, context=CONTEXT).encoding,
        loaded(checkpoint, context=CONTEXT).encoding.to(torch.bfloat16),
    ):
        assert encoding.cos.dtype is encoding.sin.dtype is torch.float32
        assert torch.equal(encoding.cos, exact.cos)
        assert torch.equal(encoding.sin, exact.sin)
