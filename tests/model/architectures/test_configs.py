"""Descriptions in both formats: what is read, and what is refused by name."""

import re

import pytest
import torch

from model.architectures.base import by_gguf_name, by_model_type
from model.architectures.fields import Fields
from model.config import EncodingSpec, ModelConfig
from model.weights.base import CheckpointError


class Stored:
    """Tensors by shape alone, but for those whose values are part of the description."""

    def __init__(self, shapes, metadata=None, values=None):
        self.shapes = shapes
        self.metadata = metadata or {}
        self.values = values or {}

    def read(self, name):
        return torch.tensor(self.values[name])

    def names(self):
        return frozenset(self.shapes)

    def shape(self, name):
        return self.shapes[name]


HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ROPE = {"base": 5e5, "width": 8, "layout": "half"}
EXPECTED = {
    "vocab_size": 99,
    "width": 48,
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_width": 100,
    "norm_eps": 1e-5,
    "trained_context": 512,
    "encoding": EncodingSpec("rope", ROPE),
    "windows": (None, None, None),
}
NAMED = {
    "llama": {},
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
    "smollm3": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 1, 0],
    },
}
ABSENT = object()


def hf(kind="llama", stored=(), **changes):
    values = {k: v for k, v in (HF | NAMED[kind] | changes).items() if v is not ABSENT}
    architecture = by_model_type(values["model_type"], "config.json")
    weights = Stored(dict.fromkeys(stored, (1,)))
    return architecture.config_from_hf(Fields("config.json", values), weights)


def refused(saying, *args, **changes):
    with pytest.raises(CheckpointError, match=saying) as caught:
        hf(*args, **changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": True}),
        ("phi3", {}),
        ("smollm3", {"encoding": EncodingSpec("rope", ROPE | {"layers": [0, 1]})}),
    ],
)
def test_plain(kind, expected):
    assert hf(kind) == ModelConfig(**EXPECTED | expected)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"num_key_value_heads": ABSENT}, {"kv_heads": 6}),
        ("llama", {"num_key_value_heads": None}, {"kv_heads": 6}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ("llama", {"hidden_act": ABSENT, "architectures": ABSENT}, {}),
        ("llama", {"dtype": "bfloat16", "pretraining_tp": 4, "use_cache": True}, {}),
        ("llama", {"rope_interleaved": False, "some_switch": None, "list": []}, {}),
        ("mistral", {"sliding_window": 40}, {"windows": (40, 40, 40)}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True, "qk_norm": True}),
    ],
)
def test_variants(kind, changes, expected):
    assert hf(kind, **changes) == ModelConfig(**EXPECTED | expected)


def test_heads_wider_than_their_share():
    config = hf(head_dim=20)
    assert config.head_dim == 20
    assert config.encoding.options["width"] == 20


def test_tied_as_stored_when_the_file_does_not_say():
    assert hf(tie_word_embeddings=ABSENT).tied_embeddings
    assert not hf(tie_word_embeddings=ABSENT, stored=["lm_head.weight"]).tied_embeddings


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
    assert hf(**changes).encoding.options["width"] == 4


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"rope_theta": ABSENT}, "rope_theta is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": ABSENT}, "rope_theta"),
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
        ({"partial_rotary_factor": 0.4}, "pairs"),
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


@pytest.mark.parametrize(
    ("section", "scaling"),
    [
        ({"type": "linear", "factor": 2}, {"type": "linear", "factor": 2.0}),
        (
            {"type": "dynamic", "factor": 2.0},
            {"type": "dynamic", "factor": 2.0, "original_context": 512},
        ),
        (
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
            {"type": "dynamic", "factor": 2.0, "original_context": 512},
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
            | {"low_freq_factor": 1, "high_freq_factor": 4.0},
            {"type": "llama3", "factor": 8.0, "original_context": 64}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        (
            {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "truncate": True},
            {"type": "yarn", "factor": 4.0, "original_context": 512},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
            | {"beta_fast": 16, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5},
            {"type": "yarn", "factor": 4.0, "original_context": 64, "magnitude": 1.5}
            | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            {"type": "yarn", "factor": 4.0, "original_context": 512, "magnitude": 1.0},
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 64} | LISTS,
            OF_LONGROPE | {"magnitude": 1.5**0.5},  # 512 = 64^1.5
        ),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 8.0}
            | LISTS
            | {"attention_factor": 1.25},
            OF_LONGROPE | {"magnitude": 1.25},
        ),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 0.5},
            {"type": "proportional", "factor": 1.0, "share": 0.5},
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scalings(key, section, scaling):
    encoding = hf(**{key: section}).encoding
    assert encoding == EncodingSpec("rope", ROPE | {"scaling": scaling})


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
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
            "starts from max_position_embeddings, 512",
        ),
        (LLAMA3, "original_max_position_embeddings is missing"),
        (
            LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 4.0},
            "high_freq_factor 4.0 must be above",
        ),
        (YARN | {"mscale": 0.7}, "only together"),
        (YARN | {"attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0}, "'mscale'"),
        (YARN | {"truncate": 1}, "true or false"),
        (YARN | {"finetuned": True}, "'finetuned' = True"),
        (YARN | {"original_max_position_embeddings": 64.0}, "an integer"),
        ({"rope_type": "longrope"} | LISTS, "original_max_position_embeddings is missing"),
        (LONGROPE | {"short_factor": None}, "short_factor is missing"),
        (LONGROPE | {"long_factor": [1.0] * 5}, "long_factor must be a list of 4 numbers"),
        (LONGROPE | {"long_factor": 3.0}, "a list of 4 numbers"),
        (LONGROPE | {"long_factor": [1.0, 1.0, 1.0, "2"]}, "must hold numbers above 0"),
        (LONGROPE | {"long_factor": [1.0, 1.0, 1.0, 0]}, "must hold numbers above 0"),
        (LONGROPE | {"long_mscale": 1.2}, "'long_mscale' = 1.2"),
        (LONGROPE | {"factor": 3.0}, "factor is 3.0, but max_position_embeddings is 8.0 times"),
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
        ({"num_key_value_heads": ABSENT}, {"kv_heads": 6}),
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
    assert hf("phi3", **changes) == ModelConfig(**EXPECTED | expected)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"attention_bias": True}, "'attention_bias' = True is not supported"),
        ({"interpolate_factor": 2}, "interpolate_factor other than 1"),
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
        ({"no_rope_layers": ABSENT}, "no_rope_layers is missing"),
        ({"no_rope_layers": [1, 1]}, "once for each layer"),
        ({"no_rope_layers": [1, 1, 2]}, "once for each layer"),
        ({"no_rope_layers": [1, 1, [0]]}, "once for each layer"),
        ({"no_rope_layers": 4}, "once for each layer"),
        ({"no_rope_layer_interval": 0}, "from 1 to"),
        ({"num_key_value_heads": ABSENT}, "num_key_value_heads is missing"),
    ],
)
def test_smollm3_that_cannot_be_honoured(changes, saying):
    refused(saying, "smollm3", **changes)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "list of strings"),
        ({"hidden_act": "tanh"}, "'tanh' is not supported"),
        ({"hidden_act": 3}, "string"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map asks to run code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 4096}, "'sliding_window' = 4096 is not supported"),
        ({"rope_interleaved": True}, "'rope_interleaved' = True"),
        ({"logit_scale": 0.5}, "'logit_scale' = 0.5"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"x\n" * 99: 1}, r"'x\\nx"),
        ({"attention_bias": 1}, "true or false"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"num_key_value_heads": 12}, "from 1 to 6"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "multiple"),
        ({"num_hidden_layers": 10**9}, "from 1 to 1024"),
        ({"vocab_size": 1 << 40}, "from 1 to"),
        ({"hidden_size": -48}, "from 1 to"),
        ({"hidden_size": 48.0}, "from 1 to"),
        ({"hidden_size": True}, "from 1 to"),
        ({"hidden_size": ABSENT}, "hidden_size is missing"),
        ({"rms_norm_eps": -1e-5}, "above 0"),
        ({"rms_norm_eps": ABSENT}, "rms_norm_eps is missing"),
        ({"max_position_embeddings": 0}, "from 1 to"),
        ({"head_dim": 1 << 20}, "from 1 to"),
        ({"intermediate_size": [100] * 10_000}, "from 1 to"),
    ],
)
def test_descriptions_that_cannot_be_honoured(changes, saying):
    refused(saying, **changes)


def test_what_relatives_must_say():
    refused("sliding_window is missing", "mistral", sliding_window=ABSENT)
    refused("num_key_value_heads is missing", "mistral", num_key_value_heads=ABSENT)
    refused("num_key_value_heads is missing", "qwen2", num_key_value_heads=ABSENT)
    refused("head_dim is missing", "qwen3", head_dim=ABSENT)


QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 1}, (None, None, None)),
        ({"sliding_window": 16, "max_window_layers": 1, "use_sliding_window": False}, (None,) * 3),
        (QWEN_WINDOWS | {"max_window_layers": 2}, (None, None, 16)),
        (QWEN_WINDOWS | {"max_window_layers": 28}, (None, None, None)),
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
    ("changes", "saying"),
    [
        (QWEN_WINDOWS, "max_window_layers is missing"),
        ({"layer_types": ["full_attention"]}, "once for each layer"),
        ({"layer_types": ["full_attention", "mamba", "full_attention"]}, "once for each layer"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, "no sliding_window"),
    ],
)
def test_windows_that_cannot_be_honoured(changes, saying):
    refused(saying, "qwen2", **changes)


GGUF = {
    "general.architecture": "llama",
    "general.name": "x",
    "tokenizer.ggml.model": "gpt2",
    "llama.embedding_length": 48,
    "llama.block_count": 3,
    "llama.feed_forward_length": 100,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 5e5,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
}
TENSORS = {"token_embd.weight": (99, 48), "output.weight": (99, 48)}


def from_gguf(arch="llama", tensors=None, stored=None, **changes):
    values = {key.replace("llama.", f"{arch}."): value for key, value in GGUF.items()}
    for key, value in changes.items():
        values[key.replace("own__", f"{arch}.").replace("__", ".")] = value
    values = {key: value for key, value in values.items() if value is not ABSENT}
    stored = stored or {}
    shapes = (TENSORS if tensors is None else tensors) | {
        name: (len(numbers),) for name, numbers in stored.items()
    }
    weights = Stored(shapes, values, stored)
    return by_gguf_name(arch, "x.gguf").config_from_gguf(Fields("x.gguf", values), weights)


def test_gguf():
    assert from_gguf() == ModelConfig(**EXPECTED)
    assert from_gguf("qwen2") == ModelConfig(**EXPECTED, qkv_bias=True)
    assert from_gguf("qwen3") == ModelConfig(**EXPECTED, qk_norm=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"own__attention__head_count_kv": ABSENT}, {"kv_heads": 6}),
        ({"own__attention__key_length": 8, "own__attention__value_length": 8}, {}),
        ({"own__vocab_size": 99}, {}),
        ({"own__rope__scaling__type": "none", "own__expert_count": None}, {}),
        (
            {"own__rope__dimension_count": 4},
            {"encoding": EncodingSpec("rope", ROPE | {"width": 4})},
        ),
    ],
)
def test_gguf_variants(changes, expected):
    assert from_gguf(**changes) == ModelConfig(**EXPECTED | expected)


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
            {"type": "yarn", "factor": 1.0, "attn_factor": 1.25},
            {},
            {"type": "yarn", "factor": 1.0, "original_context": 512, "magnitude": 1.25},
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
    changes = {f"own__rope__scaling__{key}": value for key, value in changes.items()}
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
        ({"type": "linear"}, {}, "scaling.factor is missing"),
        ({"type": "longrope"}, {}, "rope_factors_long.weight is missing"),
        ({"factor": 4.0}, FACTORS, "contradict each other"),
        ({}, {SHORT: [1.0] * 4}, "alone do not say how to rotate"),
        ({}, FACTORS | {"rope_freqs.weight": [1.0] * 4}, "alone do not say how to rotate"),
        ({}, {"rope_freqs.weight": [1.0] * 8}, r"has the shape \[8\], not \[4\]"),
        ({}, {"rope_freqs.weight": [1.0, 1.0, 0.0, 1.0]}, "must hold numbers above 0"),
        ({}, {"rope_freqs.weight": [1.0, 1.0, float("nan"), 1.0]}, "must hold numbers above 0"),
    ],
)
def test_gguf_scalings_that_cannot_be_honoured(changes, stored, saying):
    changes = {f"own__rope__scaling__{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=saying):
        from_gguf(stored=stored, **changes)


def test_gguf_of_families_with_conventions_of_their_own():
    key = "own__attention__sliding_window"
    assert from_gguf("phi3") == from_gguf("phi3", **{key: 0}) == ModelConfig(**EXPECTED)
    assert from_gguf("phi3", **{key: 40}).windows == (40, 40, 40)
    layers = from_gguf("smollm3", own__block_count=9).encoding.options["layers"]
    assert layers == [0, 1, 2, 4, 5, 6, 8]
    with pytest.raises(CheckpointError, match="sliding_window must be an integer"):
        from_gguf("phi3", **{key: -1})


def test_gguf_tells_by_its_tensors():
    biases = ["blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]
    config = from_gguf(tensors={"token_embd.weight": (99, 48)} | dict.fromkeys(biases, (48,)))
    assert config == ModelConfig(
        **EXPECTED, tied_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True
    )


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"own__rope__freq_base": ABSENT}, "rope.freq_base is missing"),
        ({"own__rope__scaling__type": "dynamic"}, "'dynamic' is not supported"),
        ({"own__rope__scaling__type": "yarn"}, "scaling.factor is missing"),
        (
            {"own__rope__scaling__type": "none", "own__rope__scaling__factor": 4.0},
            "scaling.factor' = 4.0",
        ),
        ({"own__attention__sliding_window": 4096}, "sliding_window"),
        ({"own__expert_count": 8}, "expert_count"),
        ({"own__attention__head_count_kv": [2, 2, 2]}, "from 1 to 6"),
        ({"own__attention__value_length": 16}, "value_length"),
        ({"own__rope__dimension_count": 3}, "pairs"),
        ({"own__rope__dimension_count": 16}, "from 1 to 8"),
        ({"own__vocab_size": 98}, "98, but token_embd.weight has 99 rows"),
        ({"own__block_count": 1 << 31}, "from 1 to 1024"),
        ({"own__attention__layer_norm_rms_epsilon": float("nan")}, "above 0"),
        ({"split__count": 3}, "split model"),
    ],
)
def test_gguf_that_cannot_be_honoured(changes, saying):
    with pytest.raises(CheckpointError, match=saying):
        from_gguf(**changes)


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
