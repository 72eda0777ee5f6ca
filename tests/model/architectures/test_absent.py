"""What it means that a required key is absent: as its authority computes it, and as if stated."""

import json
import logging
import shutil
from copy import deepcopy

import gguf
import pytest
import torch
import transformers

from ropewalk.model.architectures.base import architectures, by_model_type
from ropewalk.model.architectures.common import HARMLESS, TRANSFORMERS
from ropewalk.model.architectures.fields import Default, Disputed, Fields, Like
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import checkpoints, refusals
from tests.model.architectures.descriptions import ABSENT, Stored, from_gguf, hf
from tests.model.checkpoints import loaded
from tests.model.test_parity import difference

MINISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0}
MINISTRAL |= {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
FAMILIES = [found.model_type for found in architectures() if found.absent]
# What must be stated: its absence is disputed, or means something that is not served.
STATED = {
    "falcon": {
        "alibi": True,
        "multi_query": False,
        "new_decoder_architecture": False,
        "parallel_attn": False,
    },
    "gpt_neox": {"rotary_pct": 0.25},
    "granitemoehybrid": {
        "layer_types": ["attention"] * 32,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "ministral3": {"rope_parameters": MINISTRAL},
    "mistral": {"sliding_window": None},
    "mpt": {"attn_config": {}},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
LONGROPE = {"type": "longrope", "short_factor": [1.5] * 48, "long_factor": [3.0] * 48}
# Where keys count that usually do not.
CASES = {
    "cohere2": {"rope_scaling": LLAMA3},
    "ernie4_5": {"rope_scaling": LLAMA3},
    "exaone4": {"rope_scaling": LLAMA3},
    "gemma": {"rope_scaling": LLAMA3},
    "glm4": {"rope_scaling": LLAMA3},
    "gpt_neox": {"rope_scaling": LLAMA3},
    "granite": {"rope_scaling": LLAMA3},
    "granitemoe": {"rope_scaling": LLAMA3},
    "granitemoehybrid": {"rope_scaling": LLAMA3},
    "helium": {"rope_scaling": LLAMA3},
    "llama": {"rope_scaling": LLAMA3},
    "mistral": {"rope_scaling": LLAMA3},
    "mixtral": {"rope_scaling": LLAMA3},
    "olmo2": {"rope_scaling": LLAMA3},
    "olmo3": {"rope_scaling": LLAMA3},
    "olmoe": {"rope_scaling": LLAMA3},
    "phi3": {"rope_scaling": LONGROPE},
    "qwen2": {"rope_scaling": LLAMA3, "use_sliding_window": True},
    "qwen3": {"rope_scaling": LLAMA3, "use_sliding_window": True},
    "qwen3_moe": {"rope_scaling": LLAMA3},
    "smollm3": {"rope_scaling": LLAMA3},
    "starcoder2": {"rope_scaling": LLAMA3},
}


def read(family, **changes):
    """The config of a description that states as little as possible."""
    values = {"model_type": family} | STATED.get(family, {}) | CASES.get(family, {}) | changes
    values = {key: value for key, value in values.items() if value is not ABSENT}
    architecture = by_model_type(family, "config.json")
    return architecture.config_from_hf(Fields("config.json", values), Stored({}))


def meanings(family, kind):
    absent = by_model_type(family, "").absent
    return {key: what for key, what in absent.items() if isinstance(what, kind)}


def resolved(family, key):
    value = meanings(family, Default)[key].value
    return resolved(family, value.key) if isinstance(value, Like) else value


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    config = transformers.AutoConfig.for_model(family, **deepcopy(CASES.get(family, {})))
    for key, what in meanings(family, Default).items():
        if what.by != TRANSFORMERS or key == "decoder_start_token_id":
            continue  # the latter is told by T5's documentation
        if key in ("rope_theta", "rotary_emb_base"):
            rotations = config.rope_parameters
            theirs = rotations.get("full_attention", rotations)["rope_theta"]
        elif key == "rope_local_base_freq":
            theirs = config.rope_parameters["sliding_attention"]["rope_theta"]
        elif key == "sliding_window_pattern":
            theirs = config.layer_types.index("full_attention") + 1
        elif key == "original_max_position_embeddings":
            scaled = config.rope_parameters.get("full_attention", config.rope_parameters)
            theirs = scaled[key]
        else:
            theirs = getattr(config, key, resolved(family, key))
        assert theirs == resolved(family, key), key


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_is_as_if_stated(family):
    """And no required key is left that nobody defines."""
    short = read(family)
    for key in meanings(family, Default):
        assert read(family, **{key: resolved(family, key)}) == short, key


@pytest.mark.parametrize("family", ["gpt_neox", "mistral", "mpt"])
def test_what_is_disputed_must_be_stated(family):
    for key, what in meanings(family, Disputed).items():
        saying = f"{key} is missing, and its absence means {what.meanings}, so add it"
        refusals.refused(saying, read, family, **{key: ABSENT})


def test_only_what_is_disputed_has_an_opinion_against():
    found = {family for family in FAMILIES if meanings(family, Disputed)}
    assert found == {"gpt_neox", "mistral", "mpt"}


# ------------------------------------------------------------------- files as they are published

# The keys of Llama-2-7b-hf, in sizes of ours.
LLAMA2 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 260,
}
# What Llama 1 was first published with, and its relative of 16,384 tokens, Vicuna.
LLAMA1 = LLAMA2 | {"max_position_embeddings": ABSENT, "num_key_value_heads": ABSENT}
VICUNA = LLAMA2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}}
PUBLISHED = {
    "llama-2": (LLAMA2, 4096),
    "llama-1": (LLAMA1 | {"max_sequence_length": 2048}, 2048),
    "llama-1-shorter": (LLAMA1 | {"max_sequence_length": 1024}, 1024),
    "llama-1-nothing": (LLAMA1, 2048),
    "vicuna-16k": (VICUNA | {"max_sequence_length": 16384}, 16384),
    "both-and-unscaled": (LLAMA2 | {"max_sequence_length": 16384}, 4096),
    "private": (
        LLAMA2
        | {"_attn_implementation": "sdpa", "_flash_attn_2_enabled": True, "_name_or_path": "/x"}
        | {"_attn_implementation_internal": "eager", "_anything": {"else": [1]}},
        4096,
    ),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    shape = transformers.LlamaConfig(**{k: LLAMA2[k] for k in LLAMA2 if k != "architectures"})
    return checkpoints.save(checkpoints.random_model(shape), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_folders_compute_what_transformers_computes(name, weights, tmp_path):
    description, context = PUBLISHED[name]
    folder = shutil.copytree(weights, tmp_path / "model")
    values = {key: value for key, value in description.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(values))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.trained_context == context
    assert checkpoint.config.encoding.options["base"] == 10000.0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert difference(loaded(checkpoint), theirs, 1, 40) <= 1e-4


MODEL = checkpoints.llama(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def foreign(writer):
    """What makers of files add under names of their own."""
    writer.add_string("mradermacher.quantize_version", "2")
    writer.add_string("mradermacher.quantized_at", "2026-01-01T00:00:00+01:00")
    writer.add_uint32("quantize.imatrix.entries_count", 224)
    writer.add_array("somebody.else.list", [1, 2])
    writer.add_bool("flag", True)
    writer.add_float32("qwen2.rope.freq_base", 5.0)  # of another architecture


def test_gguf_without_a_base_and_with_foreign_keys(tmp_path, monkeypatch):
    model = checkpoints.random_model(MODEL)
    stated = open_checkpoint(checkpoints.write_gguf(tmp_path / "stated.gguf", model))
    decorated = checkpoints.write_gguf(tmp_path / "foreign.gguf", model, metadata=foreign)
    assert open_checkpoint(decorated).config == stated.config
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", lambda self, base: None)
    without = open_checkpoint(checkpoints.write_gguf(tmp_path / "without.gguf", model))
    assert without.config == stated.config
    assert difference(loaded(without), model, 1, 40) <= 1e-4


@pytest.mark.parametrize(
    "arch", ["exaone4", "granite", "llama", "olmo2", "qwen2", "qwen3", "phi3", "smollm3"]
)
def test_every_rotating_family_in_gguf(arch):
    assert from_gguf(arch, **{"rope.freq_base": ABSENT}).encoding.options["base"] == 10000.0


def test_unknown_keys_of_the_architecture_stay_refused():
    for key in ("mine", "mradermacher.x", "attention.scale"):
        refusals.refused("is not supported", from_gguf, **{key: 7})


def test_generation_settings_change_no_logits():
    """transformers takes them out of config.json."""
    known = set(HARMLESS.split())
    settings = set(transformers.GenerationConfig().to_dict())
    assert {key for key in settings if not key.startswith("_")} <= known


def test_private_keys_that_mean_something_are_read():
    read("opt", _remove_final_layer_norm=False, _name_or_path="x")
    saying = "_remove_final_layer_norm is not supported"
    refusals.refused(saying, read, "opt", _remove_final_layer_norm=True)


# --------------------------------------------------------------------------------------- the log


def test_what_was_assumed_is_told_in_one_line(caplog):
    caplog.set_level(logging.INFO)
    hf()
    from_gguf()
    assert caplog.messages == []
    hf(rope_theta=ABSENT, num_key_value_heads=ABSENT)
    from_gguf(**{"rope.freq_base": ABSENT})
    hf("granite", rope_theta=ABSENT, residual_multiplier=ABSENT)
    assert caplog.messages == [
        "config.json: num_key_value_heads is absent, which means num_attention_heads "
        "(transformers); rope_theta is absent, which means 10000.0 (transformers)",
        "x.gguf: llama.rope.freq_base is absent, which means 10000.0 (llama.cpp)",
        "config.json: residual_multiplier is absent, which means 1.0 (transformers); "
        "rope_theta is absent, which means 10000.0 (transformers)",
    ]
