"""Descriptions in both formats: what is read, and what is refused by name."""

import re
from dataclasses import replace

import pytest

from ropewalk.model.architectures.granite import ScaledPreNorm
from ropewalk.model.config import EncodingSpec
from ropewalk.model.weights.base import CheckpointError
from tests.model.architectures.descriptions import (
    ABSENT,
    EXPECTED,
    EXPECTED_GGUF,
    HF,
    ROPE,
    TENSORS,
    TIED,
    attention,
    by_layer,
    from_gguf,
    hf,
    refused,
    refused_in_gguf,
    rope,
)

GATED = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3", "exaone4"),
    *("granite", "granitemoehybrid"),
)


@pytest.mark.parametrize("family", HF)
def test_as_published(family):
    assert hf(family) == EXPECTED[family]


EVERYWHERE = {"windows": (None,) * 3, "encoding": rope(5e5, 8)}
NEWER = {"rotary_pct": ABSENT, "rotary_emb_base": ABSENT}
PARAMETERS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"num_key_value_heads": ABSENT}, {"num_kv_heads": 6}),
        ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ("llama", {"hidden_act": ABSENT, "architectures": ABSENT}, {}),
        ("llama", {"dtype": "bfloat16", "pretraining_tp": 4, "use_cache": True}, {}),
        ("llama", {"rope_interleaved": False, "some_switch": None, "list": []}, {}),
        ("llama", {"_attn_implementation": "sdpa", "_flash_attn_2_enabled": True}, {}),
        ("llama", {"_name_or_path": "/x", "_commit_hash": "1f", "use_flash_attn": True}, {}),
        ("llama", {"num_experts": 0, "custom_pipelines": {"x": {"impl": "a.B"}}}, {}),
        ("mistral", {"sliding_window": 40}, {"windows": (40, 40, 40)}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True, "qk_norm": True}),
        (
            "granitemoehybrid",
            {"position_embedding_type": "nope", "layer_types": ["full_attention"] * 3},
            {"encoding": EncodingSpec("nope", {})},
        ),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, EVERYWHERE),
        (
            "exaone4",
            {"layer_types": ABSENT, "sliding_window_pattern": 2},
            {"windows": (40, None, 40), "encoding": rope(5e5, 8, layers=[0, 2])},
        ),
        ("olmo2", {"attention_bias": True, "clip_qkv": None}, {"qkv_bias": True, "out_bias": True}),
        (
            "granite",
            {"attention_bias": True, "mlp_bias": True},
            {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        ),
        ("granite", {"embedding_multiplier": 6}, {"embed_scale": 6.0}),
        ("granite", {"attention_multiplier": ABSENT}, {"attention_scale": 1.0}),
        ("granite", {"residual_multiplier": ABSENT}, {"block": ScaledPreNorm(1.0)}),
        ("granite", {"logits_scaling": ABSENT}, {"logit_scale": 1.0}),
        ("bloom", {"tie_word_embeddings": False}, {"tied_embeddings": False}),
        ("mpt", attention(clip_qkv=6), {"qkv_clip": 6.0}),
        ("mpt", attention(softmax_scale=0.25), {"attention_scale": 0.25}),
        (
            "mpt",
            attention(alibi_bias_max=16),
            {"encoding": EncodingSpec("alibi", {"bias_max": 16})},
        ),
        ("mpt", attention(_name_or_path="x", _attn_implementation="eager"), {}),
        ("mpt", attention(alibi_bias_max=ABSENT), {"encoding": EncodingSpec("alibi", {})}),
        ("mpt", {"architectures": ["MptForCausalLM"], "auto_map": ABSENT}, {}),
        ("mpt", {"norm_type": "layernorm"}, {}),
        ("mpt", {"layer_norm_epsilon": 1e-6}, {"norm_eps": 1e-6}),
        ("falcon", {"bias": False}, {"qkv_bias": False, "out_bias": False, "mlp_bias": False}),
        ("falcon", {"ffn_hidden_size": 999}, {"intermediate_size": 999}),
        ("falcon", {"activation": "relu"}, {"activation": "relu"}),
        ("falcon", {"max_position_embeddings": 1024}, {"trained_context": 1024}),
        ("pythia", {"use_parallel_residual": False}, {"block": "pre_norm"}),
        ("pythia", {"attention_bias": False}, {"qkv_bias": False, "out_bias": False}),
        ("pythia", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ("pythia", {"rotary_pct": 1.0}, {"encoding": rope(1e4, 64)}),
        ("pythia", {"rotary_emb_base": 25000}, {"encoding": rope(25000.0, 16)}),
        (
            "pythia",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"encoding": rope(1e4, 16, scaling={"type": "linear", "factor": 2.0})},
        ),
        ("pythia", {"hidden_act": "relu"}, {"activation": "relu"}),
        ("gpt-j", {"n_inner": 999}, {"intermediate_size": 999}),
        ("gpt-j", {"n_positions": 512, "n_ctx": 512}, {"trained_context": 512}),
        ("gpt-j", {"activation_function": ABSENT}, {"activation": "gelu_tanh"}),
        ("gpt-j", {"activation_function": "gelu"}, {"activation": "gelu"}),
        ("gpt-j", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ("gpt-j", {"rotary_dim": 256}, {"encoding": rope(1e4, 256, "interleaved")}),
        ("pythia", NEWER | {"rope_parameters": PARAMETERS}, {}),
        ("pythia", NEWER | {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, {}),
        ("pythia", {"rope_parameters": PARAMETERS}, {}),  # in both places, and the same
        (
            "pythia",
            {"use_parallel_residual": ABSENT, "attention_bias": True, "hidden_dropout": 0.1},
            {},
        ),
        ("pythia", {"rope_scaling": None, "is_decoder": False, "gradient_checkpointing": True}, {}),
    ],
)
def test_variants(family, changes, expected):
    assert hf(family, **changes) == replace(EXPECTED[family], **expected)


def test_heads_wider_than_their_share():
    config = hf(head_dim=20)
    assert config.head_dim == 20
    assert config.encoding.options["width"] == 20


def test_tied_as_stored_when_the_file_does_not_say():
    assert hf(tie_word_embeddings=ABSENT).tied_embeddings
    assert not hf(tie_word_embeddings=ABSENT, stored=["lm_head.weight"]).tied_embeddings


def test_newer_spellings_of_bloom():
    newer = {"n_embed": ABSENT, "hidden_size": 1024, "num_attention_heads": ABSENT, "n_head": 16}
    assert hf("bloom", **newer) == hf("bloom")
    assert hf("bloom", hidden_size=1024, n_head=16) == hf("bloom")
    assert hf("bloom", seq_length=ABSENT).trained_context == 2048


QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 1}, (None, None, None)),
        ({"sliding_window": 16, "max_window_layers": 1, "use_sliding_window": False}, (None,) * 3),
        (QWEN_WINDOWS | {"max_window_layers": 2}, (None, None, 16)),
        (QWEN_WINDOWS | {"max_window_layers": 28}, (None, None, None)),
        (QWEN_WINDOWS, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4096, 4096)),
        (
            QWEN_WINDOWS
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (16, None, 16),
        ),
        ({"layer_types": ["full_attention"] * 3}, (None, None, None)),
    ],
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_by_layer(kind, changes, windows):
    assert hf(kind, **changes).windows == windows


@pytest.mark.parametrize(
    ("family", "changes", "saying"),
    [
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "list of strings"),
        ("llama", {"hidden_act": "tanh"}, "'tanh' is not supported"),
        ("llama", {"hidden_act": 3}, "string"),
        ("llama", {"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map asks to run code"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"sliding_window": 4096}, "'sliding_window' = 4096 is not supported"),
        ("llama", {"rope_interleaved": True}, "'rope_interleaved' = True"),
        ("llama", {"logit_scale": 0.5}, "'logit_scale' = 0.5"),
        ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("llama", {"x\n" * 99: 1}, r"'x\\nx"),
        ("llama", {"attention_bias": 1}, "true or false"),
        ("llama", {"tie_word_embeddings": "yes"}, "true or false"),
        ("llama", {"num_key_value_heads": 4}, "evenly"),
        ("llama", {"num_key_value_heads": 12}, "from 1 to 6"),
        ("llama", {"num_attention_heads": 7, "num_key_value_heads": 7}, "multiple"),
        ("llama", {"num_hidden_layers": 10**9}, "from 1 to 1024"),
        ("llama", {"vocab_size": 1 << 40}, "from 1 to"),
        ("llama", {"hidden_size": -48}, "from 1 to"),
        ("llama", {"hidden_size": 48.0}, "from 1 to"),
        ("llama", {"hidden_size": True}, "from 1 to"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"rms_norm_eps": -1e-5}, "above 0"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ("llama", {"max_position_embeddings": 0}, "from 1 to"),
        ("llama", {"head_dim": 1 << 20}, "from 1 to"),
        ("llama", {"intermediate_size": [100] * 10_000}, "from 1 to"),
        ("qwen2", QWEN_WINDOWS | {"max_window_layers": None}, "max_window_layers is missing"),
        ("qwen2", {"layer_types": ["full_attention"]}, "once for each layer"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "mamba", "full_attention"]},
            "once for each layer",
        ),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9},
            "no sliding_window",
        ),
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
        ("mpt", {"is_causal": False}, "is_causal is false, but only causal attention"),
        ("falcon", {"alibi": False}, "alibi is not true, but of Falcon only Falcon-RW is served"),
        ("falcon", {"alibi": ABSENT}, "alibi is not true"),
        ("falcon", {"multi_query": True}, "multi_query is not false"),
        ("falcon", {"parallel_attn": ABSENT}, "parallel_attn is not false"),
        ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture is not false"),
        ("falcon", {"activation": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        ("pythia", {"rotary_pct": ABSENT}, "rotary_pct is missing, and its absence means 0.25"),
        ("pythia", {"rotary_emb_base": None}, "rotary_emb_base is missing"),
        ("pythia", {"rotary_pct": 1.5}, "partial_rotary_factor must be at most 1"),
        ("pythia", {"rotary_pct": 0.02}, "1 coordinates cannot be rotated in pairs"),
        ("pythia", {"rope_theta": 5000.0}, "rotary_emb_base is 10000.0 here but 5000.0 elsewhere"),
        ("pythia", {"partial_rotary_factor": 0.5}, "rotary_pct is 0.25 here but 0.5 elsewhere"),
        (
            "pythia",
            NEWER | {"rotary_pct": 0.25, "rope_theta": 1e6},
            "reads rotary_emb_base, not rope_theta",
        ),
        (
            "pythia",
            {"rotary_pct": ABSENT, "partial_rotary_factor": 0.5},
            "reads rotary_pct, not partial_rotary_factor",
        ),
        ("llama", {"num_experts": 8}, "'num_experts' = 8 is not supported"),
        ("pythia", {"rope_scaling": {"type": "own"}}, "the type 'own' is not supported"),
        ("pythia", {"num_attention_heads": 7}, "512 is not a multiple of 7 heads"),
        ("pythia", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported"),
        ("pythia", {"use_parallel_residual": "yes"}, "use_parallel_residual must be true or false"),
        ("pythia", {"num_key_value_heads": 2}, "'num_key_value_heads' = 2 is not supported"),
        (
            "pythia",
            {"architectures": ["GPTNeoXForAnswers"]},
            "only GPTNeoXForCausalLM can be served",
        ),
        ("gpt-j", {"rotary_dim": None}, "rotary_dim is missing"),
        ("gpt-j", {"rotary_dim": 63}, "63 coordinates cannot be rotated in pairs"),
        ("gpt-j", {"n_head": 15}, "4096 is not a multiple of 15 heads"),
        ("gpt-j", {"rope_theta": 5e5}, "'rope_theta' = 500000.0 is not supported"),
        ("gpt-j", {"rope_scaling": {"type": "linear"}}, "'rope_scaling' = .* is not supported"),
        ("gpt-j", {"layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
        ("gpt-j", {"n_positions": None}, "n_positions is missing"),
        ("gpt-j", {"architectures": ["GPTJForQuestionAnswering"]}, "only GPTJForCausalLM"),
        ("starcoder2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supp"),
        ("starcoder2", {"num_key_value_heads": 7}, "24 query heads cannot share 7 key heads"),
        ("exaone4", {"layer_types": ABSENT}, "sliding_window_pattern must be an integer"),
        ("exaone4", {"layer_types": ["chunked_attention"] * 3}, "layer_types must have full_att"),
        ("granitemoehybrid", {"num_local_experts": 8}, "only models without experts"),
        ("granitemoehybrid", {"num_local_experts": ABSENT}, "only models without experts"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "without state-space layers"),
        ("granitemoehybrid", {"layer_types": ABSENT}, "without state-space layers"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'al"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function"),
        ("granitemoehybrid", {"mlp_bias": True}, "'mlp_bias' = True is not supported"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0"),
        ("granite", {"attention_multiplier": None}, "attention_multiplier is missing"),
        ("granite", {"num_local_experts": 8}, "'num_local_experts' = 8 is not supported"),
        ("olmo3", {"rope_theta": 1e4}, "versions of transformers read rope_theta differently"),
        (
            "olmo3",
            {"layer_types": ABSENT, "sliding_window_pattern": 2},
            "transformers ignores sliding_window_pattern; state layer_types",
        ),
        ("olmo2", {"clip_qkv": 6.0}, "'clip_qkv' = 6.0 is not supported"),
        ("olmo2", {"mlp_bias": True}, "'mlp_bias' = True is not supported"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(family, changes, saying):
    refused(saying, family, **changes)


def test_what_relatives_must_say():
    refused("sliding_window is missing, and its abs.* 4096", "mistral", sliding_window=ABSENT)
    # As many as transformers says, whatever the heads: not a multiple.
    refused("num_key_value_heads must be .* 6, not 8", "mistral", num_key_value_heads=ABSENT)
    refused("num_key_value_heads must be .* 6, not 32", "qwen2", num_key_value_heads=ABSENT)
    for kind in GATED:
        assert hf(kind, num_key_value_heads=None).num_kv_heads == 6
    assert hf("qwen3", head_dim=ABSENT).head_dim == 128


# ---------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("family", EXPECTED_GGUF)
def test_gguf(family):
    assert from_gguf(family) == EXPECTED_GGUF[family]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention.head_count_kv": ABSENT}, {"num_kv_heads": 6}),
        ({"attention.key_length": 8, "attention.value_length": 8}, {}),
        ({"attention.head_count_kv": [2, 2, 2]}, {}),
        ({"vocab_size": 99}, {}),
        ({"rope.scaling.type": "none", "expert_count": None}, {}),
        ({"expert_count": 0, "expert_used_count": 0}, {}),
        ({"tensor_data_layout": "Meta AI original pth"}, {}),
        ({"rope.dimension_count": 4}, {"encoding": EncodingSpec("rope", ROPE | {"width": 4})}),
        ({"rope.freq_base": ABSENT}, {"encoding": EncodingSpec("rope", ROPE | {"base": 1e4})}),
        ({"elsewhere": {"mradermacher.quantize_version": "2"}}, {}),
        (
            {
                "elsewhere": {
                    "quantize.imatrix.file": "x",
                    "split.count": 1,
                    "qwen2.expert_count": 8,
                }
            },
            {},
        ),
        ({"elsewhere": {"llamafile.note": "x", "mine": 7, "": 1}}, {}),
    ],
)
def test_gguf_variants(changes, expected):
    assert from_gguf(**changes) == replace(EXPECTED["llama"], **expected)


def test_gguf_of_bloom_and_mpt():
    assert from_gguf("bloom", **{"attention.head_count_kv": 6}) == from_gguf("bloom")
    assert not from_gguf("bloom", TENSORS).tied_embeddings
    config = from_gguf("mpt", **{"attention.max_alibi_bias": 16.0, "attention.clamp_kqv": 6.0})
    assert config.encoding == EncodingSpec("alibi", {"bias_max": 16.0})
    assert config.qkv_clip == 6.0


def test_gguf_of_granite():
    read = from_gguf("granite", **{"rope.scaling.finetuned": True})
    assert read == EXPECTED_GGUF["granite"]
    factors = ("embedding_scale", "attention.scale", "residual_scale")
    usual = {"embed_scale": 1.0, "attention_scale": None, "block": ScaledPreNorm(1.0)}
    assert from_gguf("granite", **dict.fromkeys(factors, ABSENT)) == replace(read, **usual)


def test_gguf_of_gpt_neox_and_gpt_j():
    for family in ("gptneox", "gptj"):
        assert from_gguf(family, TIED).tied_embeddings
        assert from_gguf(family, **{"rope.freq_base": 5e5}).encoding.options["base"] == 5e5
        assert from_gguf(family, **{"attention.head_count_kv": 6}) == from_gguf(family)
    assert from_gguf("gptneox", use_parallel_residual=False).block == "pre_norm"
    whole = from_gguf("gptneox", **{"rope.dimension_count": ABSENT})
    assert whole.encoding == rope(1e4, 8)  # as in llama.cpp


GLOBAL, LOCAL = "full_attention", "sliding_attention"


def test_cohere_2_is_rotated_by_window():
    full, window = "full_attention", "sliding_attention"
    found = hf("cohere2", layer_types=[full, window] + [full] * 30)
    assert found.encoding.options["layers"] == [1]
    assert found.windows == (None, 4096) + (None,) * 30
    found = from_gguf("cohere2", block_count=8)
    assert found.encoding.options["layers"] == [0, 1, 2, 4, 5, 6]
    refused_in_gguf(
        "attention.sliding_window is missing",
        "cohere2",
        **{"attention.sliding_window": ABSENT},
    )
    refused("rotary_pct is not supported, but 1", "cohere2", rotary_pct=0.5)
    refused("sliding_window is missing", "cohere2", sliding_window=None)


def test_gguf_of_granite_4():
    """As llama.cpp's converter writes it where nothing is an expert or a state space."""
    more = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    own = {f"ssm.{key}": 4 for key in more} | {"attention.head_count_kv": [2, 2, 2]}
    own |= {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 100}
    own |= {"rope.scaling.finetuned": True, "vocab_size": 99}
    assert from_gguf("granite", **own) == EXPECTED_GGUF["granite"]


def test_olmo_3():
    """YaRN is for the layers without a window, which GGUF stores as OLMo 2 with one."""
    yarn = {"factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    scaling = {"type": "yarn", "factor": 8.0, "original_context": 8192, "magnitude": 1.2}
    found = hf("olmo3", rope_scaling={"rope_type": "yarn", **yarn})
    windows = (40, 40, None)
    expected = by_layer(windows, 8, far=5e5, near=5e5, scaling=scaling)
    assert found == replace(EXPECTED["olmo2"], trained_context=65536, **expected)
    newer = {GLOBAL: {"rope_type": "yarn", **yarn}, LOCAL: {"rope_type": "default"}}
    assert hf("olmo3", rope_theta=ABSENT, rope_parameters=newer) == found
    assert hf("olmo3").encoding == rope(5e5, 8)  # all layers rotate alike
    yarn = {"scaling.type": "yarn", "scaling.factor": 8.0, "scaling.original_context_length": 64}
    own = {f"rope.{key}": value for key, value in yarn.items()}
    own |= {"attention.sliding_window": 40, "attention.sliding_window_pattern": [True, True, False]}
    scaling = {"type": "yarn", "factor": 8.0, "original_context": 64}
    expected = by_layer(windows, 8, far=5e5, near=5e5, scaling=scaling)
    assert from_gguf("olmo2", **own) == replace(EXPECTED["olmo2"], **expected)
    # As converted from newer files, whose layers with a window have a base of their own.
    newer = {"rope.freq_base_swa": 5e5, "rope.scaling.yarn_attn_factor": 1.2079441}
    assert from_gguf("olmo2", **own, **newer) == replace(EXPECTED["olmo2"], **expected)
    refused_in_gguf("freq_base_swa differs", "olmo2", **own, **{"rope.freq_base_swa": 1e4})


def test_gguf_of_exaone_4():
    """The size that sees all keys in every layer rotates in all of them."""
    keys = ("attention.sliding_window", "attention.sliding_window_pattern")
    found = from_gguf("exaone4", **dict.fromkeys(keys, ABSENT))
    assert found == replace(EXPECTED["exaone4"], **EVERYWHERE)
    found = from_gguf("exaone4", **{keys[1]: ABSENT, "block_count": 4})
    assert found.windows == (40, 40, 40, None)
    assert found.encoding.options["layers"] == [0, 1, 2]


def test_gguf_tells_by_its_tensors():
    biases = ["blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]
    told = {"tied_embeddings": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    config = from_gguf(tensors=TIED | dict.fromkeys(biases, (48,)))
    assert config == replace(EXPECTED["llama"], **told)


@pytest.mark.parametrize(
    ("family", "changes", "saying"),
    [
        ("llama", {"rope.scaling.type": "dynamic"}, "'dynamic' is not supported"),
        (
            "llama",
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
            "scaling.factor' = 4.0",
        ),
        ("llama", {"attention.sliding_window": 4096}, "sliding_window"),
        ("llama", {"expert_count": 8}, "expert_count"),
        ("llama", {"tensor_data_layout": "another"}, "tensor_data_layout 'another' is not"),
        ("llama", {"attention.head_count_kv": [2, 2, 1]}, "from 1 to 6"),
        ("llama", {"attention.head_count_kv": [2, 2]}, "from 1 to 6"),
        ("llama", {"attention.head_count_kv": []}, "from 1 to 6"),
        ("llama", {"attention.value_length": 16}, "value_length"),
        ("llama", {"rope.dimension_count": 3}, "pairs"),
        ("llama", {"rope.dimension_count": 16}, "from 1 to 8"),
        ("llama", {"vocab_size": 98}, "98, but token_embd.weight has 99 rows"),
        ("llama", {"block_count": 1 << 31}, "from 1 to 1024"),
        ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, "above 0"),
        ("llama", {"elsewhere": {"split.count": 3}}, "split model"),
        ("llama", {"attention.causal": False}, "llama.attention.causal is false, but only causal"),
        ("bloom", {"attention.causal": False}, "only causal attention can be served"),
        ("bloom", {"attention.head_count_kv": 2}, "head_count_kv differs from"),
        ("bloom", {"attention.max_alibi_bias": 4.0}, "max_alibi_bias' = 4.0 is not supported"),
        ("bloom", {"attention.head_count": 5}, "48 is not a multiple of 5 heads"),
        ("bloom", {"attention.layer_norm_epsilon": ABSENT}, "layer_norm_epsilon is missing"),
        ("bloom", {"vocab_size": 98}, "vocab_size is 98, but token_embd.weight has 99 rows"),
        ("mpt", {"attention.max_alibi_bias": ABSENT}, "max_alibi_bias is missing"),
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias is 0, but MPT is served with"),
        ("mpt", {"attention.head_count_kv": 2}, "head_count_kv differs from"),
        ("mpt", {"rope.freq_base": 1e4}, "rope.freq_base' = 10000.0 is not supported"),
        ("gptneox", {"use_parallel_residual": ABSENT}, "use_parallel_residual is missing"),
        ("gptneox", {"rope.dimension_count": 10}, "must be an integer from 1 to 8"),
        ("gptneox", {"rope.dimension_count": 3}, "3 coordinates cannot be rotated in pairs"),
        ("gptneox", {"rope.scaling.type": "yarn"}, "rope.scaling.type' = 'yarn' is not supported"),
        ("gptneox", {"attention.head_count_kv": 2}, "head_count_kv differs from"),
        ("gptneox", {"context_length": ABSENT}, "context_length is missing"),
        ("gptj", {"rope.dimension_count": ABSENT}, "rope.dimension_count is missing"),
        ("gptj", {"use_parallel_residual": True}, "use_parallel_residual' = True is not supp"),
        ("gptj", {"rope.scaling.factor": 2.0}, "rope.scaling.factor' = 2.0 is not supported"),
        ("starcoder2", {"attention.head_count_kv": 4}, "6 query heads cannot share 4 key heads"),
        ("starcoder2", {"attention.head_count_kv": 7}, "must be an integer from 1 to 6"),
        ("granite", {"logit_scale": ABSENT}, "logit_scale is missing"),
        ("granite", {"rope.scaling.finetuned": False}, "but of Granite only models with RoPE"),
        ("granite", {"expert_count": 8}, "expert_count' = 8 is not supported"),
        (
            "olmo2",
            {"attention.sliding_window": 40, "attention.sliding_window_pattern": [True, False]},
            "sliding_window_pattern must be a number, or true or false once for each layer",
        ),
    ],
)
def test_gguf_that_cannot_be_honoured(family, changes, saying):
    refused_in_gguf(saying, family, **changes)


@pytest.mark.parametrize(
    ("tensors", "saying"),
    [
        (TENSORS | {"rope_freqs.weight": (8,)}, "rope_freqs.weight has the shape [8], not [4]"),
        ({"output.weight": (99, 48)}, "token_embd.weight is missing"),
    ],
)
def test_gguf_tensors_that_cannot_be_honoured(tensors, saying):
    with pytest.raises(CheckpointError, match=re.escape(saying)):
        from_gguf(tensors=tensors)


def test_gguf_of_mistral_small_and_of_queries_that_grow():
    """Whose original context is the context, where a file does not state it."""
    plain = from_gguf("mistral3")
    assert plain == EXPECTED_GGUF["llama"]
    assert from_gguf("mistral3", **{"attention.temperature_scale": 0.0}) == plain
    for stated, original in ({}, plain.trained_context), ({"original_context_length": 9}, 9):
        own = {f"rope.scaling.{key}": value for key, value in stated.items()}
        found = from_gguf("mistral3", **own, **{"attention.temperature_scale": 0.25})
        scale = {"query_scale": {"beta": 0.25, "original_context": original}}
        assert found.encoding.options == plain.encoding.options | scale


def test_gguf_has_no_falcon_with_alibi():
    refused_in_gguf("general.architecture is 'falcon'; supported are .*bloom", "falcon")
