"""Descriptions in the form of published checkpoints, and what is read from them, by family."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from ropewalk.model.architectures import gemma2
from ropewalk.model.architectures.base import by_gguf_name, by_model_type
from ropewalk.model.architectures.fields import Fields
from ropewalk.model.architectures.granite import ScaledPreNorm
from ropewalk.model.architectures.olmo2 import norm_of_added
from ropewalk.model.config import EncodingSpec, ModelConfig
from tests.model import refusals

ABSENT = object()


class Stored:
    """Tensors by shape alone, but for those whose values are part of the description."""

    def __init__(self, shapes, values=None):
        self.shapes = shapes
        self.values = values or {}

    def read(self, name):
        return torch.tensor(self.values[name])

    def names(self):
        return frozenset(self.shapes)

    def shape(self, name):
        return self.shapes[name]


def changed(values, changes):
    return {key: value for key, value in (values | changes).items() if value is not ABSENT}


# --------------------------------------------------------------------------- config.json

GATED = {
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
# In the form of bloom-560m, mpt-7b, falcon-rw-1b, pythia-70m, gpt-neox-20b, gpt-j-6b,
# starcoder2-3b, c4ai-command-r7b-12-2024, gemma-2-2b, gemma-3-270m and gemma-3-4b-it, whose
# spellings are older than today's.
PLAIN = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("published/*"))}
HF = {
    name: GATED | differs
    for name, differs in {
        "llama": {},
        "mistral": {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
        },
        "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
        "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
        "olmo3": {
            "model_type": "olmo3",
            "architectures": ["Olmo3ForCausalLM"],
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        "exaone4": {
            "model_type": "exaone4",
            "architectures": ["Exaone4ForCausalLM"],
            "sliding_window": 40,
            "sliding_window_pattern": "LLG",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        "smollm3": {
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "no_rope_layers": [1, 1, 0],
        },
        "olmo2": {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
        "granitemoehybrid": {
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "embedding_multiplier": 12,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 16,
            "init_method": "mup",
            "intermediate_size": 7,
            "layer_types": ["attention"] * 3,
            "mamba_d_conv": 4,
            "mamba_n_heads": 32,
            "normalization_function": "rmsnorm",
            "num_experts_per_tok": 0,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "router_aux_loss_coef": 0.01,
            "shared_intermediate_size": 100,
        },
        "granite": {
            "model_type": "granite",
            "architectures": ["GraniteForCausalLM"],
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
        },
    }.items()
} | {name: json.loads(text) for name, text in PLAIN.items()}


def rope(base, width, layout="half", **others):
    return EncodingSpec("rope", {"base": base, "width": width, "layout": layout, **others})


ROPE = {"base": 5e5, "width": 8, "layout": "half"}
GATED_CONFIG = ModelConfig(
    vocab_size=99,
    hidden_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=100,
    norm_eps=1e-5,
    trained_context=512,
    encoding=EncodingSpec("rope", ROPE),
    windows=(None, None, None),
)


def plain(layers, heads, width, vocab_size, **others):
    """What families with layer norms and without gates have in common."""
    return ModelConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": width,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": width // heads,
            "intermediate_size": 4 * width,
            "norm_eps": 1e-5,
            "trained_context": 2048,
            "windows": (None,) * layers,
            "norm": "layer",
            "gated": False,
        }
        | others
    )


BIASES = {"norm_bias": True, "mlp_bias": True, "qkv_bias": True, "out_bias": True}
ALIBI = {"encoding": EncodingSpec("alibi", {}), "tied_embeddings": True}
ROUNDED = {"encoding": EncodingSpec("alibi", {"scaled": True, "hf_exact": True})}
BLOOM = ALIBI | BIASES | {"activation": "gelu_tanh", "embed_norm": True}
MPT = ALIBI | {"activation": "gelu"}
NEOX = BIASES | {"block": "parallel", "activation": "gelu"}
GPTJ = {
    "norm_bias": True,
    "mlp_bias": True,
    "block": "parallel_one_norm",
    "activation": "gelu_tanh",
    "head_bias": True,
}
GEMMA2 = {"tied_embeddings": True, "activation": "gelu_tanh", "block": gemma2.block}
GEMMA3 = GEMMA2 | {"qk_norm": True}
CAPS = {"score_cap": 50.0, "logit_cap": 30.0}
STARCODER2 = BIASES | {"activation": "gelu_tanh", "num_kv_heads": 2}
EXPECTED = {
    "llama": GATED_CONFIG,
    "mistral": GATED_CONFIG,
    "qwen2": replace(GATED_CONFIG, qkv_bias=True),
    "qwen3": replace(GATED_CONFIG, qk_norm=True),
    "phi3": GATED_CONFIG,
    "smollm3": replace(GATED_CONFIG, encoding=EncodingSpec("rope", ROPE | {"layers": [0, 1]})),
    "olmo2": replace(GATED_CONFIG, qk_norm=True, qk_norm_whole=True, block=norm_of_added),
    "olmo3": replace(
        GATED_CONFIG,
        qk_norm=True,
        qk_norm_whole=True,
        block=norm_of_added,
        windows=(40, 40, None),
    ),
    "exaone4": replace(
        GATED_CONFIG,
        qk_norm=True,
        block=norm_of_added,
        windows=(40, 40, None),
        encoding=EncodingSpec("rope", ROPE | {"layers": [0, 1]}),
    ),
    "granite": replace(
        GATED_CONFIG,
        embed_scale=12.0,
        attention_scale=0.0078125,
        block=ScaledPreNorm(0.22),
        logit_scale=1 / 16,
    ),
    "bloom": plain(24, 16, 1024, 250880, **BLOOM, trained_context=4096),
    "mpt": plain(32, 32, 4096, 50432, **MPT),
    "falcon": plain(24, 32, 2048, 50304, **MPT | BIASES | ROUNDED),
    "pythia": plain(6, 8, 512, 50304, **NEOX, encoding=rope(1e4, 16)),
    "gpt-neox-20b": plain(
        44, 64, 6144, 50432, **NEOX | {"activation": "gelu_tanh"}, encoding=rope(1e4, 24)
    ),
    "gpt-j": plain(28, 16, 4096, 50400, **GPTJ, encoding=rope(1e4, 64, "interleaved")),
    "starcoder2": plain(
        30,
        24,
        3072,
        49152,
        **STARCODER2,
        encoding=rope(999999.4420358813, 128),
        windows=(4096,) * 30,
        trained_context=16384,
        tied_embeddings=True,
    ),
}

EXPECTED["granitemoehybrid"] = EXPECTED["granite"]


def by_layer(windows, width, far=1e6, near=1e4, **scaled):
    """Where a layer without a window rotates by a base of its own."""
    full = [layer for layer, window in enumerate(windows) if window is None]
    elsewhere = rope(near, width).options
    return {
        "windows": windows,
        "encoding": rope(far, width, layers=full, elsewhere=elsewhere, **scaled),
    }


COHERE2 = {"norm": "layer", "block": "parallel_one_norm"}
EXPECTED["cohere2"] = ModelConfig(
    vocab_size=256000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    norm_eps=1e-5,
    trained_context=132096,
    encoding=rope(5e4, 128, "interleaved", layers=[i for i in range(32) if (i + 1) % 4]),
    windows=(4096, 4096, 4096, None) * 8,
    tied_embeddings=True,
    logit_scale=0.25,
    **COHERE2,
)
EXPECTED["gemma2"] = ModelConfig(
    vocab_size=256000,
    hidden_size=2304,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    intermediate_size=9216,
    norm_eps=1e-6,
    trained_context=8192,
    embed_scale=2304**0.5,
    attention_scale=1 / 16,
    encoding=rope(1e4, 256),
    windows=(4096, None) * 13,
    **GEMMA2 | CAPS,
)
EXPECTED["gemma3"] = ModelConfig(
    vocab_size=262144,
    hidden_size=640,
    num_layers=18,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    intermediate_size=2048,
    norm_eps=1e-6,
    trained_context=32768,
    embed_scale=640**0.5,
    attention_scale=1 / 16,
    **GEMMA3,
    **by_layer((512, 512, 512, 512, 512, None) * 3, 256),
)
EXPECTED["gemma3-4b"] = replace(
    EXPECTED["gemma3"],
    vocab_size=262208,
    hidden_size=2560,
    num_layers=34,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=10240,
    trained_context=131072,
    embed_scale=2560**0.5,
    **by_layer(
        (*(1024, 1024, 1024, 1024, 1024, None) * 5, 1024, 1024, 1024, 1024),
        256,
        scaling={"type": "linear", "factor": 8.0},
    ),
)


def hf(family="llama", stored=(), **changes):
    """The config that is read. stored: names of tensors that the checkpoint holds."""
    values = changed(HF[family], changes)
    architecture = by_model_type(values["model_type"], "config.json")
    weights = Stored(dict.fromkeys(stored, (1,)))
    return architecture.config_from_hf(Fields("config.json", values), weights)


def attention(**changes):
    """An attn_config of MPT."""
    return {"attn_config": changed(HF["mpt"]["attn_config"], changes)}


def refused(saying, *args, **changes):
    assert refusals.refused(saying, hf, *args, **changes).startswith("config.json: ")


# ---------------------------------------------------------------------------------- GGUF

GGUF = {
    "embedding_length": 48,
    "block_count": 3,
    "feed_forward_length": 100,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "rope.freq_base": 5e5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 512,
}
PLAIN_GGUF = {
    "context_length": 2048,
    "embedding_length": 48,
    "block_count": 2,
    "feed_forward_length": 192,
    "attention.head_count": 6,
    "attention.layer_norm_epsilon": 1e-5,
}
OWN_GGUF = {
    "cohere2": {key: value for key, value in GGUF.items() if "rms" not in key}
    | {"attention.layer_norm_epsilon": 1e-5, "attention.sliding_window": 40}
    | {"logit_scale": 0.25, "rope.dimension_count": 8, "rope.scaling.type": "none"},
    "exaone4": GGUF | {"attention.sliding_window": 40, "attention.sliding_window_pattern": 3},
    "granite": GGUF
    | {"embedding_scale": 12.0, "attention.scale": 0.0078125}
    | {"residual_scale": 0.22, "logit_scale": 16.0},
    "bloom": PLAIN_GGUF,
    "mpt": PLAIN_GGUF | {"attention.max_alibi_bias": 8.0},
    "gptneox": PLAIN_GGUF | {"rope.dimension_count": 4, "use_parallel_residual": True},
    "gptj": PLAIN_GGUF | {"rope.dimension_count": 4},
    "gemma2": GGUF
    | {"attention.sliding_window": 8}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": GGUF | {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
    "starcoder2": PLAIN_GGUF | {"attention.head_count_kv": 2, "rope.freq_base": 1e5},
}
TENSORS = {"token_embd.weight": (99, 48), "output.weight": (99, 48)}
TIED = {"token_embd.weight": (99, 48)}
EXPECTED_GGUF = {
    "llama": GATED_CONFIG,
    "qwen2": EXPECTED["qwen2"],
    "qwen3": EXPECTED["qwen3"],
    "phi3": GATED_CONFIG,
    "olmo2": EXPECTED["olmo2"],
    "exaone4": EXPECTED["exaone4"],
    "granite": EXPECTED["granite"],
    "bloom": plain(2, 6, 48, 99, **BLOOM),
    "mpt": plain(2, 6, 48, 99, **MPT),
    "gptneox": plain(2, 6, 48, 99, **NEOX, encoding=rope(1e4, 4)),
    "gptj": plain(2, 6, 48, 99, **GPTJ, encoding=rope(1e4, 4, "interleaved")),
    "cohere2": replace(
        GATED_CONFIG,
        encoding=rope(5e5, 8, "interleaved", layers=[0, 1, 2]),
        windows=(40, 40, 40),
        tied_embeddings=True,
        logit_scale=0.25,
        **COHERE2,
    ),
    "gemma2": replace(
        GATED_CONFIG,
        embed_scale=48**0.5,
        attention_scale=8**-0.5,
        windows=(8, None, 8),
        **GEMMA2 | CAPS,
    ),
    "gemma3": replace(
        GATED_CONFIG,
        embed_scale=48**0.5,
        attention_scale=8**-0.5,
        **GEMMA3 | by_layer((8, None, 8), 8, far=5e5),
    ),
    "starcoder2": plain(2, 6, 48, 99, **STARCODER2, encoding=rope(1e5, 8)),
}


def from_gguf(arch="llama", tensors=None, stored=None, elsewhere=None, **own):
    """The config that is read.

    tensors: shapes by name. stored: values of others. elsewhere: metadata whose keys do not begin
    with the architecture's name. own: metadata whose keys do.
    """
    if tensors is None:
        tensors = TIED if arch in ("bloom", "mpt", "cohere2", "gemma2", "gemma3") else TENSORS
    values = {
        f"{arch}.{key}": value for key, value in changed(OWN_GGUF.get(arch, GGUF), own).items()
    }
    values |= {"general.architecture": arch, "general.name": "x", "general.file_type": 0}
    values |= {"tokenizer.ggml.model": "gpt2"} | (elsewhere or {})
    stored = stored or {}
    shapes = tensors | {name: (len(numbers),) for name, numbers in stored.items()}
    weights = Stored(shapes, stored)
    return by_gguf_name(arch, "x.gguf").config_from_gguf(Fields("x.gguf", values), weights)


def refused_in_gguf(saying, *args, **changes):
    refusals.refused(saying, from_gguf, *args, **changes)
