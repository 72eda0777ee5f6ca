"""Every scaling against the formulas of transformers, as config.json states it."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.rotation import rope_from_hf
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import EncodingError, create
from tests.model.tiny import CONFIG, CPU, ROPE

HEAD_DIM = 24
LONGER = 4096
ORIGINAL = {"original_max_position_embeddings": 1024}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
    "long_factor": [1.5 + 2.0 * pair for pair in range(12)],
}
STATIC = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, **BANDS, **ORIGINAL},
    "llama3-all-slow": {"factor": 8.0, "low_freq_factor": 500.0, "high_freq_factor": 501.0}
    | ORIGINAL,
    "llama3-all-fast": {"factor": 8.0, "low_freq_factor": 1e-6, "high_freq_factor": 1e-5}
    | ORIGINAL,
    "yarn": {"factor": 4.0, **ORIGINAL},
    "yarn-original-unsaid": {"factor": 4.0},
    "yarn-whole-ramp": {"factor": 4.0, "truncate": True, "beta_fast": 8.0, "beta_slow": 0.5}
    | ORIGINAL,
    "yarn-no-truncation": {"factor": 4.0, "truncate": False, "beta_fast": 8.0} | ORIGINAL,
    "yarn-no-ramp": {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}
    | ORIGINAL,
    "yarn-said": {"factor": 4.0, "attention_factor": 1.7, **ORIGINAL},
    "yarn-weights": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.1, **ORIGINAL},
    "yarn-equal-weights": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, **ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional-odd": {"partial_rotary_factor": 0.4, "factor": 3.0},
    "proportional-all": {"factor": 2.0},
    "longrope": LISTS | ORIGINAL,
    "longrope-factor": LISTS | ORIGINAL | {"factor": 4.0},
    "longrope-said": LISTS | ORIGINAL | {"attention_factor": 1.4},
    "dynamic": {"factor": 3.0},
}
LENGTHS = {"longrope": [1, 1023, 1024, 1025, 9000], "dynamic": [1, 4095, 4096, 4097, 9000, 40000]}


def theirs(name, base=10000.0):
    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": base, **STATIC[name]}
    return LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=LONGER,
        rope_parameters=parameters,
    )


def ours(name, base=10000.0, context=5000):
    """As read from the config.json of a model that has the scaling."""
    section = {"rope_type": name.split("-")[0], "rope_theta": base, **STATIC[name]}
    fields = Fields("config.json", {"rope_parameters": section})
    spec = rope_from_hf(fields, HEAD_DIM, LONGER)
    fields.finish()
    return create(spec, replace(CONFIG, head_dim=HEAD_DIM), context, CPU)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 150.0])
@pytest.mark.parametrize("name", STATIC)
def test_frequencies_and_magnitude_equal_transformers(name, base):
    kind = name.split("-")[0]
    config, rope = theirs(name, base), ours(name, base=base)
    for length in LENGTHS.get(kind, [1, 100_000]):
        expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
        found = rope.frequencies_at(length)
        assert found.dtype is torch.float32
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)
        assert math.isclose(rope.magnitude, magnitude, rel_tol=1e-12)
        if kind not in LENGTHS:
            assert torch.equal(found, rope.frequencies)


@pytest.mark.parametrize("name", [name for name in STATIC if name.split("-")[0] not in LENGTHS])
def test_tables_are_those_of_transformers(name):
    config, rope = theirs(name), ours(name)
    positions = torch.tensor([0, 1, 77, 1024, 4999])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert torch.allclose(rope.cos[positions], cos[0, :, : HEAD_DIM // 2], atol=2e-3)
    assert torch.allclose(rope.sin[positions], sin[0, :, : HEAD_DIM // 2], atol=2e-3)
    assert torch.allclose(rope.cos[positions[:3]], cos[0, :3, : HEAD_DIM // 2], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "boundary"), [("dynamic", LONGER), ("longrope", 1024), ("yarn", None)]
)
def test_served_frequencies_are_those_of_the_served_context(name, boundary):
    """Fixed at load, at every position: a key never depends on how long its sequence becomes."""
    near, far = ours(name, context=900), ours(name, context=LONGER + 1)
    assert torch.equal(near.frequencies, near.frequencies_at(900))
    assert torch.equal(far.frequencies, far.frequencies_at(LONGER + 1))
    assert torch.equal(near.cos, far.cos[:900]) == (boundary is None)
    at = near if boundary is None else ours(name, context=boundary)
    assert torch.equal(at.cos[:900], near.cos)


def test_stored_factors_are_divisors():
    factors = [1.0, 2.5, 8.0, 3.0]
    options = ROPE | {"scaling": {"type": "factors", "factors": factors}}
    rope = create(EncodingSpec("rope", options), CONFIG, 10, CPU)
    exact = 10000.0 ** -torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64)
    expected = exact / torch.tensor(factors, dtype=torch.float64)
    assert torch.allclose(rope.frequencies.double(), expected, rtol=1e-6, atol=0)
    assert rope.magnitude == 1.0


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("linear", "must be an object with type and its parameters, but is 'linear'"),
        ({"factor": 2.0}, "type must be one of dynamic, factors, linear.* but is None"),
        ({"type": "ntk"}, "but is 'ntk'"),
        ({"type": "linear"}, r"takes factor, but got \[\]"),
        ({"type": "linear", "factor": 0}, "cannot use factor = 0"),
        ({"type": "linear", "factor": True}, "cannot use factor = True"),
        ({"type": "linear", "factor": "2"}, "cannot use factor = '2'"),
        ({"type": "linear", "factor": math.inf}, "cannot use factor = inf"),
        ({"type": "linear", "factor": 2.0, "magnitude": 2.0}, "takes factor, but got"),
        ({"type": "yarn", "factor": 2.0}, "factor, original_context, and optionally beta_fast"),
        ({"type": "yarn", "factor": 2.0, "original_context": 9, "truncate": 1}, "truncate = 1"),
        ({"type": "factors", "factors": [1.0]}, "a factor for each of 4 pairs, but got 1"),
        ({"type": "factors", "factors": [1.0, 1.0, 1.0, 0.0]}, "cannot use factors"),
        ({"type": "factors", "factors": 3.0}, "cannot use factors = 3.0"),
        (
            {"type": "llama3", "factor": 2.0, "original_context": 9}
            | {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "a high_freq_factor above 4.0, but got 4.0",
        ),
    ],
)
def test_refusals(scaling, words):
    with pytest.raises(EncodingError, match=words):
        create(EncodingSpec("rope", ROPE | {"scaling": scaling}), CONFIG, 10, CPU)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [({"width": 2}, "dynamic", "a width above 2"), ({"base": 1.0}, "yarn", "a base above 1")],
)
def test_shapes_without_a_formula(options, kind, words):
    scaling = {"type": kind, "factor": 2.0, "original_context": 9}
    with pytest.raises(EncodingError, match=words):
        create(EncodingSpec("rope", ROPE | options | {"scaling": scaling}), CONFIG, 10, CPU)
