"""Forms of RoPE's settings that files are published in, against what transformers makes of them."""

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.model.architectures.base import by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.encodings.base import create
from tests.model.architectures.descriptions import Stored, from_gguf, hf
from tests.model.checkpoints import CPU

CONTEXT = 96  # max_position_embeddings
ORIGINAL = {"original_max_position_embeddings": 24}
YARN = {"type": "yarn", "factor": 4.0, **ORIGINAL}
WEIGHTS = {"mscale": 0.707, "mscale_all_dim": 1.1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0], "long_factor": [1.5, 4.0, 8.0, 16.0, 32.0]}
LONGROPE = {"rope_type": "longrope"} | LISTS
# The section, and what is told of it.
FORMS = {
    "attn-factor": (YARN | {"attn_factor": 1.0}, "attn_factor = 1.0 is without effect"),
    "attn-factor-half": (YARN | {"attn_factor": 0.5}, "attn_factor = 0.5 is without effect"),
    "attn-beside-attention": (YARN | {"attn_factor": 0.5, "attention_factor": 1.3}, "attn_factor"),
    "mscale-alone": (YARN | {"mscale": 0.707}, "mscale = 0.707 is without effect"),
    "mscale-all-dim-alone": (YARN | {"mscale_all_dim": 0.7}, "mscale_all_dim = 0.7 is without"),
    "mscale-all-dim-0": (YARN | {"mscale": 1.4, "mscale_all_dim": 0}, "mscale = 1.4 is without"),
    "mscale-0": (YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}, None),
    "mscale-both": (YARN | WEIGHTS, None),
    "mscale-beside-attention": (YARN | WEIGHTS | {"attention_factor": 1.3}, "mscale = 0.707 is"),
    "type-twice": (YARN | {"rope_type": "yarn"}, None),
    "finetuned": (YARN | {"finetuned": True}, None),
    "finetuned-linear": ({"type": "linear", "factor": 2.0, "finetuned": True}, None),
    "not-finetuned": (YARN | {"finetuned": False}, None),
    "beta-0": (YARN | {"beta_fast": 0, "beta_slow": 0.0}, None),
    "factor-null": (YARN | {"factor": None}, "factor is null, which means 4.0"),
    "original-unsaid": ({"type": "yarn", "factor": 4.0}, "which means max_position_embeddings"),
    "llama3": (LLAMA3 | ORIGINAL, None),
    "llama3-original-unsaid": (LLAMA3, "original_max_position_embeddings is absent, which means"),
    "longrope": (LONGROPE | ORIGINAL, None),
    "longrope-factor": (LONGROPE | ORIGINAL | {"factor": 4.0}, None),
    "longrope-larger-factor": (LONGROPE | ORIGINAL | {"factor": 7.5}, "factor 7.5 counts, though"),
    "longrope-smaller-factor": (LONGROPE | ORIGINAL | {"factor": 1.0}, "is 4.0 times the orig"),
    "longrope-original-unsaid": (LONGROPE, "which means max_position_embeddings"),
    "longrope-unsaid-but-factor": (LONGROPE | {"factor": 4.0}, "which means max_position"),
    "dynamic-original": (
        {"type": "dynamic", "factor": 2.0, **ORIGINAL},
        "not from the original 24",
    ),
}


def description(section, key="rope_scaling"):
    base = {"rope_theta": 150.0}
    if key == "rope_parameters":
        section, base = section | base, {}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 260,
        "hidden_size": 60,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        key: section,
        **base,
    }


def read(values):
    """The encoding of a description, as it is served."""
    architecture = by_model_type(values["model_type"], "config.json")
    config = architecture.config_from_hf(Fields("config.json", values), Stored({}))
    return create(config.encoding, config, 200, CPU)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", FORMS)
def test_frequencies_and_magnitude(name, key, caplog):
    caplog.set_level(logging.INFO)
    section, told = FORMS[name]
    values = description(section, key)
    theirs = transformers.LlamaConfig.from_dict(copy.deepcopy(values))
    ours = read(values)
    kind = section.get("rope_type", section.get("type"))
    for length in (10, 24, 25, 96, 97, 200):
        expected, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, CPU, seq_len=length)
        assert torch.allclose(ours.frequencies_at(length), expected, rtol=1e-6, atol=0)
        assert math.isclose(ours.magnitude, magnitude, rel_tol=1e-12)
    ours_said = [each.getMessage() for each in caplog.records if each.name.startswith("ropewalk.")]
    of_rope = [line for line in ours_said if "rope" in line or "original" in line]
    assert len(of_rope) == (told is not None)
    assert told is None or told in of_rope[0]
    assert "(transformers)" in "".join(of_rope) or told is None


def test_partly_rotated_families_take_the_same_forms():
    values = {
        "model_type": "gpt_neox",
        "hidden_size": 480,
        "num_attention_heads": 6,
        "max_position_embeddings": CONTEXT,
        "rotary_pct": 0.25,
        "rope_scaling": YARN | {"attn_factor": 0.5, "finetuned": True},
    }
    theirs = transformers.GPTNeoXConfig.from_dict(copy.deepcopy(values))
    theirs.head_dim = 80
    ours = read(values)
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, CPU)
    assert torch.allclose(ours.frequencies, expected, rtol=1e-6, atol=0)
    assert math.isclose(ours.magnitude, magnitude, rel_tol=1e-12)


# ------------------------------------------------------------------ what a model was trained for

QWEN_CARD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": QWEN_CARD}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": QWEN_CARD}, 131072),  # Qwen3's
        ({"max_position_embeddings": 131072, "rope_scaling": QWEN_CARD}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": QWEN_CARD | {"factor": 2.0}}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": QWEN_CARD}, 131072),
        (
            {"max_position_embeddings": 32768, "original_max_position_embeddings": 32768}
            | {"rope_scaling": {"type": "yarn", "factor": 2.5}},
            81920,
        ),
        # It may have been raised already.
        (
            {"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4}},
            131072,
        ),
        ({"rope_scaling": QWEN_CARD | {"factor": 1e29}}, 1 << 22),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 500}}, 512),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_yarn_reaches_the_original_context_times_the_factor(kind, changes, context):
    assert hf(kind, **changes).trained_context == context


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, 512),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0, "original_context_length": 512}, 512),
        ({"original_context_length": 4096}, 512),
    ],
)
def test_yarn_in_gguf_does_too(changes, context):
    changes = {f"rope.scaling.{key}": value for key, value in changes.items()}
    assert from_gguf(**changes).trained_context == context


# ------------------------------------------------------------------------- GGUF, as in llama.cpp


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"scaling.type": "linear"}, None),
        ({"scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"scale_linear": 1.0}, None),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, {"type": "linear", "factor": 2.0}),
    ],
)
def test_gguf_factors(changes, scaling):
    encoding = from_gguf(**{f"rope.{key}": value for key, value in changes.items()}).encoding
    assert encoding.options.get("scaling") == scaling


def test_yarn_without_a_factor_in_gguf_changes_nothing():
    plain, yarn = from_gguf(), from_gguf(**{"rope.scaling.type": "yarn"})
    served = [create(one.encoding, replace(one), 64, CPU) for one in (plain, yarn)]
    assert torch.equal(served[0].frequencies, served[1].frequencies)
    assert served[0].magnitude == served[1].magnitude == 1.0
