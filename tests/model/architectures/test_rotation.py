"""RoPE's settings in both formats, and those of Phi-3 and SmolLM3: read, or refused by name."""

import math
from dataclasses import replace

import pytest

from ropewalk.model.config import EncodingSpec
from ropewalk.model.weights.base import CheckpointError
from tests.model.architectures.descriptions import ABSENT, EXPECTED, ROPE, from_gguf, hf, refused


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 7e4},
        {"rope_theta": 70000},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
        {"rope_theta": 7e4, "rope_parameters": {"rope_theta": 7e4}},
        {"rope_theta": 7e4, "rope_scaling": None},
        {"rope_theta": 7e4, "rope_scaling": {"type": "default"}},
    ],
)
def test_both_spellings_of_the_base(changes):
    assert hf(**changes).encoding.options["base"] == 7e4


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotation(changes):
    """transformers rotates half of Phi-3's heads then, and whole ones of Llama all the same."""
    assert hf("phi3", **changes).encoding.options["width"] == 4
    refused("partial_rotary_factor 0.5 is not supported for this family", **changes)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        (
            {"rope_theta": ABSENT, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "full_attention",
        ),
        ({"rope_theta": ABSENT, "rotary_emb_base": 5e5}, "rotary_emb_base"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "elsewhere"),
        ({"rope_theta": 0}, "above 0"),
        ({"rope_theta": True}, "above 0"),
        ({"rope_theta": 10**400}, "above 0"),
        ({"rope_theta": "1e4"}, "above 0"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 8.0}}, "'mrope' is not supported"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "elsewhere"),
        ({"rope_parameters": {"rope_theta": 5e5, "factor": 8.0}}, "'factor' = 8.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "full_attention"),
        ({"rope_scaling": 4}, "object"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4"),
        ({"partial_rotary_factor": 1.5}, "at most 1"),
        ({"head_dim": 9}, "pairs"),
    ],
)
def test_rotations_that_cannot_be_honoured(changes, saying):
    refused(saying, **changes)


LISTS = {"short_factor": [1, 1.5, 2.0, 2], "long_factor": [1.0, 4.0, 8.0, 16.0]}
OF_LONGROPE = {
    "type": "longrope",
    "short_factors": [1.0, 1.5, 2.0, 2.0],
    "long_factors": [1.0, 4.0, 8.0, 16.0],
    "original_context": 64,
}


def test_the_original_context_may_stand_outside():
    section = {"rope_type": "yarn", "factor": 4.0}
    for changes in (
        {"original_max_position_embeddings": 64, "rope_scaling": section},
        {"rope_scaling": section | {"original_max_position_embeddings": 64}},
    ):
        assert hf(**changes).encoding.options["scaling"]["original_context"] == 64


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64} | LISTS


@pytest.mark.parametrize(
    ("section", "saying"),
    [
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": -1.0}, "above 0"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "'beta_fast' = 32"),
        ({"type": "default", "factor": 2.0}, "'factor' = 2.0"),
        ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, "rope_type and type differ"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "'alpha' = 1000.0"),
        (
            LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 4.0},
            "high_freq_factor 4.0 must be above",
        ),
        (YARN | {"mscale": -0.7}, "mscale must be a number above 0"),
        (YARN | {"attn_factor": "1"}, "attn_factor must be a number above 0"),
        (YARN | {"extrapolation_factor": 0.5}, "'extrapolation_factor' = 0.5"),
        ({"rope_type": "yarn"}, "factor is missing"),
        (YARN | {"truncate": 1}, "true or false"),
        (YARN | {"finetuned": "yes"}, "finetuned must be true or false"),
        (YARN | {"original_max_position_embeddings": 64.0}, "an integer"),
        (LONGROPE | {"short_factor": None}, "short_factor is missing"),
        (LONGROPE | {"long_factor": [1.0] * 5}, "long_factor must be a list of 4 numbers"),
        (LONGROPE | {"long_factor": 3.0}, "a list of 4 numbers"),
        (LONGROPE | {"long_factor": [1.0, 1.0, 1.0, "2"]}, "must hold numbers above 0"),
        (LONGROPE | {"long_factor": [1.0, 1.0, 1.0, 0]}, "must hold numbers above 0"),
        (LONGROPE | {"long_mscale": 1.2}, "'long_mscale' = 1.2"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "above 1"),
    ],
)
def test_scalings_that_cannot_be_honoured(section, saying):
    refused(saying, rope_scaling=section)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling have different types",
        ),
        (
            {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}},
            "rope_parameters and rope_scaling differ",
        ),
        (
            {"original_max_position_embeddings": 32}
            | {"rope_scaling": YARN | {"original_max_position_embeddings": 64}},
            "is 64 here but 32 elsewhere",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": YARN | {"partial_rotary_factor": 1.0}},
            "is 1.0 here but 0.5 elsewhere",
        ),
    ],
)
def test_rotations_that_contradict_themselves(changes, saying):
    refused(saying, **changes)


PHI3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": ABSENT}, {"num_kv_heads": 6}),
        ({"sliding_window": 40}, {"windows": (40, 40, 40)}),
        ({"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attention_bias": False}, {}),
        ({"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}, {}),
        ({"original_max_position_embeddings": 64, "auto_map": PHI3_CODE}, {}),
        (
            {"original_max_position_embeddings": 64, "rope_scaling": LISTS | {"type": "su"}},
            {
                "encoding": EncodingSpec(
                    "rope", ROPE | {"scaling": OF_LONGROPE | {"magnitude": 1.5**0.5}}
                )
            },
        ),
    ],
)
def test_phi3(changes, expected):
    assert hf("phi3", **changes) == replace(EXPECTED["phi3"], **expected)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"attention_bias": True}, "'attention_bias' = True is not supported"),
        ({"interpolate_factor": 2}, "interpolate_factor other than 1"),
        (
            {"rope_scaling": LISTS | {"type": "su", "original_max_position_embeddings": 64}},
            "reads original_max_position_embeddings at the top level",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Phi3ForCausalLM"}}, "auto_map asks to run"),
        ({"auto_map": {"AutoModel": "modeling_phi3.Phi3ForCausalLM"}}, "auto_map asks to run"),
        ({"auto_map": "modeling_phi3.Phi3ForCausalLM"}, "auto_map asks to run"),
    ],
)
def test_phi3_that_cannot_be_honoured(changes, saying):
    refused(saying, "phi3", **changes)


@pytest.mark.parametrize(
    ("changes", "layers", "windows"),
    [
        ({}, [0, 1], None),
        ({"no_rope_layers": [0, 0, 0, 1]}, [], None),
        ({"no_rope_layers": ABSENT, "no_rope_layer_interval": 2}, [0, 2], None),
        ({"no_rope_layers": None, "no_rope_layer_interval": 4}, [0, 1, 2], None),
        ({"no_rope_layers": ABSENT}, [0, 1, 2], None),
        ({"no_rope_layer_interval": 4}, [0, 1], None),
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 28}, [0, 1], None),
        ({"use_sliding_window": True, "sliding_window": 9}, [0, 1], (None, None, 9)),
        (
            {"use_sliding_window": True, "sliding_window": 9}
            | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            [0, 1],
            (9, None, None),
        ),
    ],
)
def test_smollm3(changes, layers, windows):
    config = hf("smollm3", **changes)
    assert config.encoding.options["layers"] == layers
    assert config.windows == (windows or (None, None, None))


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        (
            {"no_rope_layers": ABSENT, "no_rope_layer_interval": None},
            "no_rope_layer_interval is missing",
        ),
        ({"no_rope_layers": [1, 1]}, "once for each layer"),
        ({"no_rope_layers": [1, 1, 2]}, "once for each layer"),
        ({"no_rope_layers": [1, 1, [0]]}, "once for each layer"),
        ({"no_rope_layers": 4}, "once for each layer"),
        ({"no_rope_layer_interval": 0}, "from 1 to"),
        ({"num_key_value_heads": ABSENT}, "6 query heads cannot share 4 key heads"),
    ],
)
def test_smollm3_that_cannot_be_honoured(changes, saying):
    refused(saying, "smollm3", **changes)


SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = {SHORT: [1.0, 1.5, 2.0, 2.0], LONG: [1.0, 4.0, 8.0, 16.0]}


@pytest.mark.parametrize(
    ("changes", "stored", "scaling"),
    [
        ({"factor": 4.0}, {}, {"type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 4.0}, {}, {"type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0},
            {},
            {"type": "yarn", "factor": 4.0, "original_context": 512},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0}
            | {"yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0, "finetuned": True},
            {},
            {"type": "yarn", "factor": 4.0, "original_context": 64}
            | {"beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (
            {"type": "yarn", "factor": 4.0, "attn_factor": 1.25},
            {},
            {"type": "yarn", "factor": 4.0, "original_context": 512}
            | {"magnitude": (0.1 * math.log(4.0) + 1.0) * 1.25},
        ),
        (
            {},
            {"rope_freqs.weight": [1.0, 1.0, 2.5, 8.0]},
            {"type": "factors", "factors": [1.0, 1.0, 2.5, 8.0]},
        ),
        (
            {"type": "longrope", "original_context_length": 64, "attn_factor": 1.25},
            FACTORS,
            OF_LONGROPE | {"magnitude": 1.25},
        ),
        ({"original_context_length": 64}, FACTORS, OF_LONGROPE | {"magnitude": 1.0}),
        ({}, FACTORS, OF_LONGROPE | {"magnitude": 1.0, "original_context": 512}),
    ],
)
def test_gguf_scalings(changes, stored, scaling):
    changes = {f"rope.scaling.{key}": value for key, value in changes.items()}
    encoding = from_gguf(stored=stored, **changes).encoding
    assert encoding == EncodingSpec("rope", ROPE | {"scaling": scaling})


@pytest.mark.parametrize(
    ("changes", "stored", "saying"),
    [
        ({"type": "yarn", "factor": 4.0, "yarn_attn_factor": 1.2}, {}, "yarn_attn_factor"),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier"),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, {}, "yarn_ext_factor"),
        ({"factor": 4.0, "attn_factor": 1.2}, {}, "attn_factor' = 1.2"),
        ({"attn_factor": 1.2}, {}, "attn_factor' = 1.2"),
        ({"alpha": 1000.0}, {}, "alpha' = 1000.0"),
        ({"type": "linear", "factor": -1.0}, {}, "scaling.factor must be a number above 0"),
        ({"type": "longrope"}, {}, "rope_factors_long.weight is missing"),
        ({"factor": 4.0}, FACTORS, "contradict each other"),
        ({}, {SHORT: [1.0] * 4}, "alone do not define a rotation"),
        ({}, FACTORS | {"rope_freqs.weight": [1.0] * 4}, "alone do not define a rotation"),
        ({}, {"rope_freqs.weight": [1.0] * 8}, r"has the shape \[8\], not \[4\]"),
        ({}, {"rope_freqs.weight": [1.0, 1.0, 0.0, 1.0]}, "must hold numbers above 0"),
        ({}, {"rope_freqs.weight": [1.0, 1.0, float("nan"), 1.0]}, "must hold numbers above 0"),
    ],
)
def test_gguf_scalings_that_cannot_be_honoured(changes, stored, saying):
    changes = {f"rope.scaling.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=saying):
        from_gguf(stored=stored, **changes)


def test_gguf_of_families_with_conventions_of_their_own():
    key = "attention.sliding_window"
    assert from_gguf("phi3") == from_gguf("phi3", **{key: 0}) == EXPECTED["phi3"]
    assert from_gguf("phi3", **{key: 40}).windows == (40, 40, 40)
    layers = from_gguf("smollm3", block_count=9).encoding.options["layers"]
    assert layers == [0, 1, 2, 4, 5, 6, 8]
    with pytest.raises(CheckpointError, match="sliding_window must be an integer"):
        from_gguf("phi3", **{key: -1})
