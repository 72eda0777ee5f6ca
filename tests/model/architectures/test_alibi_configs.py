"""Descriptions of the families with ALiBi, in both formats, and what is refused by name."""

import json

import pytest

from ropewalk.model.architectures.base import by_gguf_name, by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import EncodingSpec, ModelConfig
from tests.model.architectures.test_configs import ABSENT, Stored
from tests.model.refusals import refused

# In the form of bloom-560m, mpt-7b and falcon-rw-1b, whose spellings are older than today's.
PUBLISHED = {
    "bloom": """{
        "apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": true,
        "model_type": "bloom", "n_embed": 1024, "n_inner": null, "n_layer": 24,
        "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 4096,
        "skip_bias_add": true, "skip_bias_add_qkv": false, "transformers_version": "4.20.0",
        "use_cache": true, "vocab_size": 250880, "architectures": ["BloomForCausalLM"]
    }""",
    "mpt": """{
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": true, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": false, "clip_qkv": null,
            "prefix_lm": false, "qk_ln": false, "softmax_scale": null
        },
        "auto_map": {
            "AutoConfig": "configuration_mpt.MPTConfig",
            "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"
        },
        "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
        "init_config": {
            "emb_init_std": null, "emb_init_uniform_lim": null, "fan_mode": "fan_in",
            "init_div_is_residual": true, "init_gain": 0, "init_nonlinearity": "relu",
            "init_std": 0.02, "name": "kaiming_normal_", "verbose": 0
        },
        "init_device": "cpu", "learned_pos_emb": true, "logit_scale": null, "max_seq_len": 2048,
        "model_type": "mpt", "n_heads": 32, "n_layers": 32, "no_bias": true,
        "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1", "use_cache": false, "verbose": 0, "vocab_size": 50432
    }""",
    "falcon": """{
        "alibi": true, "apply_residual_connection_post_layernorm": false,
        "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_falcon.FalconConfig",
            "AutoModel": "modeling_falcon.FalconModel",
            "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"
        },
        "bias": true, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
        "hidden_size": 2048, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "model_type": "falcon", "multi_query": false, "new_decoder_architecture": false,
        "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": true,
        "vocab_size": 50304
    }""",
}


def plain(layers, heads, width, **others):
    """What the three have in common."""
    return ModelConfig(
        **{
            "width": width,
            "layers": layers,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": width // heads,
            "ffn_width": 4 * width,
            "norm_eps": 1e-5,
            "trained_context": 2048,
            "encoding": EncodingSpec("alibi", {}),
            "windows": (None,) * layers,
            "tied_embeddings": True,
            "norm": "layer",
            "gated": False,
        }
        | others
    )


BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}
EXPECTED = {
    "bloom": plain(
        24,
        16,
        1024,
        vocab_size=250880,
        trained_context=4096,
        activation="gelu_tanh",
        embed_norm=True,
        **BIASES,
    ),
    "mpt": plain(32, 32, 4096, vocab_size=50432, activation="gelu"),
    "falcon": plain(
        24,
        32,
        2048,
        vocab_size=50304,
        activation="gelu",
        encoding=EncodingSpec("alibi", {"scaled": True, "hf_exact": True}),
        **BIASES,
    ),
}


def changed(values, changes):
    return {k: v for k, v in (values | changes).items() if v is not ABSENT}


def hf(family, **changes):
    values = changed(json.loads(PUBLISHED[family]), changes)
    architecture = by_model_type(values["model_type"], "config.json")
    return architecture.config_from_hf(Fields("config.json", values), Stored({}))


def attention(**changes):
    """An attn_config of MPT."""
    return {"attn_config": changed(json.loads(PUBLISHED["mpt"])["attn_config"], changes)}


# --------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("family", PUBLISHED)
def test_as_published(family):
    assert hf(family) == EXPECTED[family]


def test_newer_spellings_of_bloom():
    newer = {"n_embed": ABSENT, "hidden_size": 1024, "num_attention_heads": ABSENT, "n_head": 16}
    assert hf("bloom", **newer) == hf("bloom")
    assert hf("bloom", hidden_size=1024, n_head=16) == hf("bloom")
    assert hf("bloom", seq_length=ABSENT).trained_context == 2048


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("bloom", {"tie_word_embeddings": False}, "tied_embeddings", False),
        ("mpt", attention(clip_qkv=6), "qkv_clip", 6.0),
        ("mpt", attention(softmax_scale=0.25), "attention_scale", 0.25),
        ("mpt", attention(alibi_bias_max=16), "encoding", EncodingSpec("alibi", {"bias_max": 16})),
        ("mpt", attention(_name_or_path="x", _attn_implementation="eager"), "heads", 32),
        ("mpt", attention(alibi_bias_max=ABSENT), "encoding", EncodingSpec("alibi", {})),
        ("mpt", {"architectures": ["MptForCausalLM"], "auto_map": ABSENT}, "heads", 32),
        ("mpt", {"norm_type": "layernorm"}, "norm", "layer"),
        ("mpt", {"layer_norm_epsilon": 1e-6}, "norm_eps", 1e-6),
        ("falcon", {"bias": False}, "qkv_bias", False),
        ("falcon", {"ffn_hidden_size": 999}, "ffn_width", 999),
        ("falcon", {"activation": "relu"}, "activation", "relu"),
        ("falcon", {"max_position_embeddings": 1024}, "trained_context", 1024),
    ],
)
def test_variants(family, changes, field, value):
    assert getattr(hf(family, **changes), field) == value


@pytest.mark.parametrize(
    ("family", "changes", "saying"),
    [
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is not supported",
        ),
        ("bloom", {"hidden_size": 2048}, "hidden_size is 2048, but n_embed is 1024"),
        ("bloom", {"num_attention_heads": 7}, "1024 is not a multiple of 7 heads"),
        ("bloom", {"layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
        ("bloom", {"rope_theta": 1e4}, "'rope_theta' = 10000.0 is not supported"),
        ("bloom", {"architectures": ["BloomForTokenClassification"]}, "only BloomForCausalLM"),
        (
            "mpt",
            {"attn_config": ABSENT},
            "attn_config is missing, and its absence means ALiBi to transf",
        ),
        ("mpt", attention(alibi=False), "alibi is false, but MPT is served with ALiBi only"),
        ("mpt", attention(qk_ln=True), "qk_ln is not supported"),
        ("mpt", attention(prefix_lm=True), "prefix_lm is not supported"),
        ("mpt", attention(attn_uses_sequence_id=True), "attn_uses_sequence_id is not supported"),
        ("mpt", attention(attn_type="multiquery_attention"), "must be multihead_attention"),
        ("mpt", attention(kv_n_heads=4), "'kv_n_heads' = 4 is not supported"),
        ("mpt", attention(rope=True), "'rope' = True is not supported"),
        ("mpt", attention(clip_qkv=0), "clip_qkv must be a number above 0"),
        ("mpt", {"no_bias": False}, "no_bias is false"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is not supported"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type must be low_precision_layernorm"),
        ("mpt", {"expansion_ratio": 3}, "expansion_ratio must be 4"),
        ("mpt", {"ffn_config": {"ffn_type": "mptgeglu"}}, "'ffn_config'"),
        ("mpt", {"architectures": ["MPTForX"]}, "only MptForCausalLM can be served"),
        ("mpt", {"auto_map": {"AutoModelForCausalLM": "a.B"}}, "asks to run code"),
        ("falcon", {"alibi": False}, "alibi is not true, but of Falcon only Falcon-RW is served"),
        ("falcon", {"alibi": ABSENT}, "alibi is not true"),
        ("falcon", {"multi_query": True}, "multi_query is not false"),
        ("falcon", {"parallel_attn": ABSENT}, "parallel_attn is not false"),
        ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture is not false"),
        ("falcon", {"activation": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
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
    "tokenizer.ggml.model": "gpt2",
}
OF_MPT = {"attention.max_alibi_bias": 8.0}
SIZES = {"vocab_size": 99, "tied_embeddings": True}


def of_gguf(family, tensors=(), **changes):
    values = changed(GGUF | (OF_MPT if family == "mpt" else {}), changes)
    metadata = {
        key if key.startswith(("general.", "tokenizer.")) else f"{family}.{key}": value
        for key, value in values.items()
    }
    weights = Stored({"token_embd.weight": (99, 48), **dict.fromkeys(tensors, (1,))}, metadata)
    architecture = by_gguf_name(family, "a.gguf")
    return architecture.config_from_gguf(Fields("a.gguf", metadata), weights)


def test_gguf():
    bloom = {"activation": "gelu_tanh", "embed_norm": True, **BIASES}
    assert of_gguf("bloom") == plain(2, 6, 48, **SIZES, **bloom)
    assert of_gguf("mpt") == plain(2, 6, 48, **SIZES, activation="gelu")
    assert of_gguf("bloom", **{"attention.head_count_kv": 6}) == of_gguf("bloom")
    assert not of_gguf("bloom", ["output.weight"]).tied_embeddings


def test_gguf_of_mpt_says_how_steep_and_how_clipped():
    config = of_gguf("mpt", **{"attention.max_alibi_bias": 16.0, "attention.clamp_kqv": 6.0})
    assert config.encoding == EncodingSpec("alibi", {"bias_max": 16.0})
    assert config.qkv_clip == 6.0


@pytest.mark.parametrize(
    ("family", "changes", "saying"),
    [
        ("bloom", {"attention.head_count_kv": 2}, "head_count_kv differs from"),
        ("bloom", {"attention.max_alibi_bias": 4.0}, "max_alibi_bias' = 4.0 is not supported"),
        ("bloom", {"attention.head_count": 5}, "48 is not a multiple of 5 heads"),
        ("bloom", {"attention.layer_norm_epsilon": ABSENT}, "layer_norm_epsilon is missing"),
        ("bloom", {"vocab_size": 98}, "vocab_size is 98, but token_embd.weight has 99 rows"),
        ("mpt", {"attention.max_alibi_bias": ABSENT}, "max_alibi_bias is missing"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias is 0, but MPT is served with"),
        ("mpt", {"attention.head_count_kv": 2}, "head_count_kv differs from"),
        ("mpt", {"rope.freq_base": 1e4}, "rope.freq_base' = 10000.0 is not supported"),
    ],
)
def test_gguf_that_cannot_be_served(family, changes, saying):
    refused(saying, of_gguf, family, **changes)


def test_gguf_has_no_falcon_with_alibi():
    refused("general.architecture is 'falcon'; supported are .*bloom", of_gguf, "falcon")
