"""Descriptions in both formats: what is read, and what is refused by name."""

import re

import pytest
import torch

from ropewalk.model.architectures.base import by_gguf_name, by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.config import EncodingSpec, ModelConfig
from ropewalk.model.weights.base import CheckpointError
from tests.model import refusals


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
    assert refusals.refused(saying, hf, *args, **changes).startswith("config.json: ")


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
        ("llama", {"_attn_implementation": "sdpa", "_flash_attn_2_enabled": True}, {}),
        ("llama", {"_name_or_path": "/x", "_commit_hash": "1f", "use_flash_attn": True}, {}),
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
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": -1e-5}, "above 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"max_position_embeddings": 0}, "from 1 to"),
        ({"head_dim": 1 << 20}, "from 1 to"),
        ({"intermediate_size": [100] * 10_000}, "from 1 to"),
    ],
)
def test_descriptions_that_cannot_be_honoured(changes, saying):
    refused(saying, **changes)


def test_what_relatives_must_say():
    refused("sliding_window is missing, and its abs.* 4096", "mistral", sliding_window=ABSENT)
    # As many as transformers says, whatever the heads: not a multiple.
    refused("num_key_value_heads must be .* 6, not 8", "mistral", num_key_value_heads=ABSENT)
    refused("num_key_value_heads must be .* 6, not 32", "qwen2", num_key_value_heads=ABSENT)
    for kind in NAMED:
        assert hf(kind, num_key_value_heads=None).kv_heads == 6
    assert hf("qwen3", head_dim=ABSENT).head_dim == 128


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
    ("changes", "saying"),
    [
        (QWEN_WINDOWS | {"max_window_layers": None}, "max_window_layers is missing"),
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
        (
            {"own__rope__freq_base": ABSENT},
            {"encoding": EncodingSpec("rope", ROPE | {"base": 1e4})},
        ),
        ({"mradermacher__quantize_version": "2"}, {}),
        ({"quantize__imatrix__file": "x", "split__count": 1, "qwen2__expert_count": 8}, {}),
        ({"llamafile__note": "x", "mine": 7, "": 1}, {}),
    ],
)
def test_gguf_variants(changes, expected):
    assert from_gguf(**changes) == ModelConfig(**EXPECTED | expected)


def test_gguf_tells_by_its_tensors():
    biases = ["blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]
    config = from_gguf(tensors={"token_embd.weight": (99, 48)} | dict.fromkeys(biases, (48,)))
    assert config == ModelConfig(
        **EXPECTED, tied_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True
    )


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"own__rope__scaling__type": "dynamic"}, "'dynamic' is not supported"),
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
