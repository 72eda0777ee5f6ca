"""Gemma: what its three versions read, in both formats."""

from dataclasses import replace

import pytest

from tests.model.architectures.descriptions import (
    ABSENT,
    EXPECTED,
    EXPECTED_GGUF,
    by_layer,
    from_gguf,
    hf,
    refused,
)

GLOBAL, LOCAL = "full_attention", "sliding_attention"
EIGHT_TIMES = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ABSENT, "sliding_window_pattern": 6}, {}),
        (
            {"layer_types": ABSENT, "sliding_window_pattern": 9},
            by_layer(((512,) * 8 + (None,)) * 2, 256),
        ),
        (
            {"layer_types": [GLOBAL] + [LOCAL] * 17, "rope_theta": 5, "rope_local_base_freq": 7},
            by_layer((None,) + (512,) * 17, 256, far=5.0, near=7.0),
        ),
        ({"query_pre_attn_scalar": 168}, {"attention_scale": 168**-0.5}),
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ({"hidden_activation": ABSENT}, {}),
        (
            {"rope_scaling": EIGHT_TIMES},
            by_layer(
                (512, 512, 512, 512, 512, None) * 3, 256, scaling={"type": "linear", "factor": 8.0}
            ),
        ),
        (
            {
                "rope_theta": ABSENT,
                "rope_local_base_freq": ABSENT,
                "rope_scaling": ABSENT,
                "rope_parameters": {
                    GLOBAL: EIGHT_TIMES | {"rope_theta": 3e6},
                    LOCAL: {"rope_type": "default"},
                },
            },
            by_layer(
                (512, 512, 512, 512, 512, None) * 3,
                256,
                far=3e6,
                scaling={"type": "linear", "factor": 8.0},
            ),
        ),
    ],
)
def test_gemma_3(changes, expected):
    assert hf("gemma3", **changes) == replace(EXPECTED["gemma3"], **expected)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention' = True is not supp"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping' = 50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping' = 30.0 is not supported"),
        ({"layer_types": [LOCAL]}, "layer_types must have full_attention or sliding_attention"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"hidden_activation": "tanh"}, "hidden_activation 'tanh' is not supported"),
        ({"rope_parameters": {GLOBAL: None}}, "rope_local_base_freq' = 10000.0 is not supp"),
        (
            {"rope_parameters": {GLOBAL: None}, "rope_scaling": EIGHT_TIMES},
            "rope_parameters and rope_scaling are both there",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}, "rope_theta": ABSENT},
            "rope_parameters: 'rope_type' = 'linear' is not supported",
        ),
    ],
)
def test_gemma_3_that_cannot_be_honoured(changes, saying):
    refused(saying, "gemma3", **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping"], ABSENT), {}),
        ({"attn_logit_softcapping": None}, {"score_cap": None}),
        ({"sliding_window_size": 4096}, {}),
        ({"final_logit_softcapping": None}, {"logit_cap": None}),
        ({"layer_types": [GLOBAL] * 25 + [LOCAL]}, {"windows": (None,) * 25 + (4096,)}),
        ({"query_pre_attn_scalar": 224}, {"attention_scale": 224**-0.5}),
    ],
)
def test_gemma_2(changes, expected):
    assert hf("gemma2", **changes) == replace(EXPECTED["gemma2"], **expected)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number above 0, not 0"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention' = True is not supp"),
    ],
)
def test_gemma_2_that_cannot_be_honoured(changes, saying):
    refused(saying, "gemma2", **changes)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"attn_logit_softcapping": ABSENT, "final_logit_softcapping": ABSENT}, {}),
        ({"attention.sliding_window": ABSENT}, {"windows": (4096, None, 4096)}),
        (  # the largest, which alone divides by its width
            {"block_count": 46, "embedding_length": 96, "attention.key_length": 8},
            {"num_layers": 46, "hidden_size": 96, "embed_scale": 96**0.5}
            | {"attention_scale": 16**-0.5, "windows": (8, None) * 23},
        ),
    ],
)
def test_gguf_of_gemma_2(own, expected):
    tensors = {"token_embd.weight": (99, own.get("embedding_length", 48))}
    found = from_gguf("gemma2", tensors, **own)
    assert found == replace(EXPECTED_GGUF["gemma2"], **expected)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"rope.freq_base_swa": 2e4}, by_layer((8, None, 8), 8, far=5e5, near=2e4)),
        (
            {"attention.sliding_window_pattern": ABSENT, "block_count": 7},
            {"num_layers": 7, **by_layer((8, 8, 8, 8, 8, None, 8), 8, far=5e5)},
        ),
        (
            {"attention.sliding_window": ABSENT, "attention.sliding_window_pattern": ABSENT},
            by_layer((None, None, None), 8, far=5e5),
        ),
        (  # the largest, which alone divides by its width
            {"block_count": 62, "embedding_length": 96, "attention.key_length": 8},
            {
                "num_layers": 62,
                "hidden_size": 96,
                "embed_scale": 96**0.5,
                "attention_scale": 16**-0.5,
                **by_layer((8, None) * 31, 8, far=5e5),
            },
        ),
    ],
)
def test_gguf_of_gemma_3(own, expected):
    tensors = {"token_embd.weight": (99, own.get("embedding_length", 48))}
    found = from_gguf("gemma3", tensors, **own)
    assert found == replace(EXPECTED_GGUF["gemma3"], **expected)


@pytest.mark.parametrize("key", ["hidden_act", "hidden_activation"])
def test_the_first_has_one_activation_whatever_it_calls_it(key):
    stated = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 8}
    stated["hidden_act"] = None
    for name in ("gelu", "gelu_pytorch_tanh", None):
        assert hf("llama", **stated | {key: name}).activation == "gelu_tanh"
    for wrong in ({key: "silu"}, {"use_bidirectional_attention": True}):
        refused(*wrong, "llama", **stated | wrong)
