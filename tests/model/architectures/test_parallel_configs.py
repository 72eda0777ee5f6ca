"""Descriptions of GPT-NeoX and GPT-J, in both formats, and what is refused of them."""

import json

import pytest

from ropewalk.model.architectures.base import by_gguf_name, by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import EncodingSpec, ModelConfig
from tests.model.architectures.test_configs import ABSENT, Stored
from tests.model.refusals import refused

# In the form of pythia-70m, gpt-neox-20b and gpt-j-6b, whose spellings are older than today's.
PUBLISHED = {
    "pythia": """{
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02,
        "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": true,
        "use_parallel_residual": true, "vocab_size": 50304
    }""",
    "gpt-neox-20b": """{
        "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0,
        "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 24576,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
        "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
        "transformers_version": "4.19.0.dev0", "use_cache": true, "vocab_size": 50432
    }""",
    "gpt-j": """{
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256,
        "gradient_checkpointing": false, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": null, "n_layer": 28,
        "n_positions": 2048, "resid_pdrop": 0.0, "rotary": true, "rotary_dim": 64,
        "scale_attn_weights": true, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {
            "text-generation": {"do_sample": true, "max_length": 50, "temperature": 1.0}
        },
        "tie_word_embeddings": false, "tokenizer_class": "GPT2Tokenizer",
        "transformers_version": "4.18.0.dev0", "use_cache": true, "vocab_size": 50400
    }""",
}


def rope(base, width, layout="half", **others):
    return EncodingSpec("rope", {"base": base, "width": width, "layout": layout, **others})


def parallel(layers, heads, width, **others):
    """What both families have in common."""
    usual = {
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "width": width,
        "head_dim": width // heads,
        "ffn_width": 4 * width,
        "norm_eps": 1e-5,
        "trained_context": 2048,
        "windows": (None,) * layers,
        "norm": "layer",
        "norm_bias": True,
        "mlp_bias": True,
        "gated": False,
    }
    return ModelConfig(**usual | others)


NEOX = {"block": "parallel", "activation": "gelu", "qkv_bias": True, "out_bias": True}
GPTJ = {"block": "parallel_one_norm", "activation": "gelu_tanh", "head_bias": True}
EXPECTED = {
    "pythia": parallel(6, 8, 512, vocab_size=50304, encoding=rope(1e4, 16), **NEOX),
    "gpt-neox-20b": parallel(
        44,
        64,
        6144,
        vocab_size=50432,
        encoding=rope(1e4, 24),
        **NEOX | {"activation": "gelu_tanh"},
    ),
    "gpt-j": parallel(
        28, 16, 4096, vocab_size=50400, encoding=rope(1e4, 64, "interleaved"), **GPTJ
    ),
}


def changed(values, changes):
    return {k: v for k, v in (values | changes).items() if v is not ABSENT}


def hf(family, **changes):
    values = changed(json.loads(PUBLISHED[family]), changes)
    architecture = by_model_type(values["model_type"], "config.json")
    return architecture.config_from_hf(Fields("config.json", values), Stored({}))


# --------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("family", PUBLISHED)
def test_as_published(family):
    assert hf(family) == EXPECTED[family]


NEWER = {"rotary_pct": ABSENT, "rotary_emb_base": ABSENT}
PARAMETERS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    "changes",
    [
        NEWER | {"rope_parameters": PARAMETERS},
        NEWER | {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_parameters": PARAMETERS},  # in both places, and the same
        {"use_parallel_residual": ABSENT, "attention_bias": True, "hidden_dropout": 0.1},
        {"rope_scaling": None, "is_decoder": False, "gradient_checkpointing": True},
    ],
)
def test_other_spellings_of_the_same_neox(changes):
    assert hf("pythia", **changes) == EXPECTED["pythia"]


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("pythia", {"use_parallel_residual": False}, "block", "pre_norm"),
        ("pythia", {"attention_bias": False}, "qkv_bias", False),
        ("pythia", {"attention_bias": False}, "out_bias", False),
        ("pythia", {"attention_bias": False}, "mlp_bias", True),
        ("pythia", {"tie_word_embeddings": True}, "tied_embeddings", True),
        ("pythia", {"rotary_pct": 1.0}, "encoding", rope(1e4, 64)),
        ("pythia", {"rotary_emb_base": 25000}, "encoding", rope(25000.0, 16)),
        (
            "pythia",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "encoding",
            rope(1e4, 16, scaling={"type": "linear", "factor": 2.0}),
        ),
        ("pythia", {"hidden_act": "relu"}, "activation", "relu"),
        ("gpt-j", {"n_inner": 999}, "ffn_width", 999),
        ("gpt-j", {"n_positions": 512, "n_ctx": 512}, "trained_context", 512),
        ("gpt-j", {"activation_function": ABSENT}, "activation", "gelu_tanh"),
        ("gpt-j", {"activation_function": "gelu"}, "activation", "gelu"),
        ("gpt-j", {"tie_word_embeddings": True}, "tied_embeddings", True),
        ("gpt-j", {"rotary_dim": 256}, "encoding", rope(1e4, 256, "interleaved")),
    ],
)
def test_variants(family, changes, field, value):
    assert getattr(hf(family, **changes), field) == value


@pytest.mark.parametrize(
    ("family", "changes", "saying"),
    [
        ("pythia", {"rotary_pct": ABSENT}, "rotary_pct is missing, and its absence means 0.25"),
        ("pythia", {"rotary_emb_base": None}, "rotary_emb_base is missing"),
        ("pythia", {"rotary_pct": 1.5}, "partial_rotary_factor must be at most 1"),
        ("pythia", {"rotary_pct": 0.02}, "1 coordinates cannot be rotated in pairs"),
        ("pythia", {"rope_theta": 5000.0}, "rotary_emb_base is 10000.0 here but 5000.0 elsewhere"),
        ("pythia", {"partial_rotary_factor": 0.5}, "rotary_pct is 0.25 here but 0.5 elsewhere"),
        ("pythia", {"rope_scaling": {"type": "own"}}, "the type 'own' is not supported"),
        ("pythia", {"num_attention_heads": 7}, "512 is not a multiple of 7 heads"),
        ("pythia", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported"),
        ("pythia", {"use_parallel_residual": "yes"}, "use_parallel_residual must be true or false"),
        ("pythia", {"num_key_value_heads": 2}, "'num_key_value_heads' = 2 is not supported"),
        ("pythia", {"architectures": ["GPTNeoXModel"]}, "only GPTNeoXForCausalLM can be served"),
        ("gpt-j", {"rotary_dim": None}, "rotary_dim is missing"),
        ("gpt-j", {"rotary_dim": 63}, "63 coordinates cannot be rotated in pairs"),
        ("gpt-j", {"n_head": 15}, "4096 is not a multiple of 15 heads"),
        ("gpt-j", {"rope_theta": 5e5}, "'rope_theta' = 500000.0 is not supported"),
        ("gpt-j", {"rope_scaling": {"type": "linear"}}, "'rope_scaling' = .* is not supported"),
        ("gpt-j", {"layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
        ("gpt-j", {"n_positions": None}, "n_positions is missing"),
        ("gpt-j", {"architectures": ["GPTJForQuestionAnswering"]}, "only GPTJForCausalLM"),
    ],
)
def test_what_would_change_the_answers_is_refused_by_name(family, changes, saying):
    refused(saying, hf, family, **changes)


# ---------------------------------------------------------------------------------- GGUF

GGUF = {
    "general.file_type": 0,
    "context_length": 2048,
    "embedding_length": 48,
    "block_count": 2,
    "feed_forward_length": 192,
    "attention.head_count": 6,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.dimension_count": 4,
    "tokenizer.ggml.model": "gpt2",
}


def of_gguf(family, tensors=("output.weight",), **changes):
    own = {"use_parallel_residual": True} if family == "gptneox" else {}
    metadata = {
        key if key.startswith(("general.", "tokenizer.")) else f"{family}.{key}": value
        for key, value in changed(GGUF | own, changes).items()
    }
    weights = Stored({"token_embd.weight": (99, 48), **dict.fromkeys(tensors, (1,))}, metadata)
    architecture = by_gguf_name(family, "a.gguf")
    return architecture.config_from_gguf(Fields("a.gguf", metadata), weights)


def test_gguf():
    expected = parallel(2, 6, 48, vocab_size=99, encoding=rope(1e4, 4), **NEOX)
    assert of_gguf("gptneox") == expected
    encoding = rope(1e4, 4, "interleaved")
    assert of_gguf("gptj") == parallel(2, 6, 48, vocab_size=99, encoding=encoding, **GPTJ)
    for family in ("gptneox", "gptj"):
        assert of_gguf(family, tensors=()).tied_embeddings
        assert of_gguf(family, **{"rope.freq_base": 5e5}).encoding.options["base"] == 5e5
        assert of_gguf(family, **{"attention.head_count_kv": 6}) == of_gguf(family)
    assert of_gguf("gptneox", use_parallel_residual=False).block == "pre_norm"
    whole = of_gguf("gptneox", **{"rope.dimension_count": ABSENT})
    assert whole.encoding == rope(1e4, 8)  # as in llama.cpp


@pytest.mark.parametrize(
    ("family", "changes", "saying"),
    [
        ("gptneox", {"use_parallel_residual": ABSENT}, "use_parallel_residual is missing"),
        ("gptneox", {"rope.dimension_count": 10}, "must be an integer from 1 to 8"),
        ("gptneox", {"rope.dimension_count": 3}, "3 coordinates cannot be rotated in pairs"),
        ("gptneox", {"rope.scaling.type": "yarn"}, "rope.scaling.type' = 'yarn' is not supported"),
        ("gptneox", {"attention.head_count_kv": 2}, "head_count_kv differs from"),
        ("gptneox", {"context_length": ABSENT}, "context_length is missing"),
        ("gptj", {"rope.dimension_count": ABSENT}, "rope.dimension_count is missing"),
        ("gptj", {"use_parallel_residual": True}, "use_parallel_residual' = True is not supp"),
        ("gptj", {"rope.scaling.factor": 2.0}, "rope.scaling.factor' = 2.0 is not supported"),
    ],
)
def test_gguf_that_cannot_be_served(family, changes, saying):
    refused(saying, of_gguf, family, **changes)
