"""Descriptions of T5 models in every published spelling, and what of them is refused."""

import json

import pytest
from safetensors.torch import load_file, save_file

from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from tests.model import encoder_decoders as tiny
from tests.model.checkpoints import save

# The keys of google-t5/t5-small and of google/umt5-small, with sizes of ours.
SMALL = {"d_model": 32, "d_kv": 7, "num_heads": 3, "d_ff": 40, "vocab_size": 260}
OLD_T5 = SMALL | {
    "architectures": ["T5ForConditionalGeneration"],
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"prefix": "summarize: "}},
}
UMT5 = OLD_T5 | {
    "architectures": ["UMT5ForConditionalGeneration"],
    "dense_act_fn": "gelu_new",
    "feed_forward_proj": "gated-gelu",
    "is_gated_act": True,
    "model_type": "umt5",
    "relative_attention_max_distance": 128,
    "scalable_attention": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "T5Tokenizer",
    "use_cache": True,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """{model_type: a folder}, UMT5 with a head of its own."""
    sizes = {"d_model": 32, "d_kv": 7, "num_heads": 3}
    return {
        "t5": save(tiny.random_model(tiny.t5()), tmp_path_factory.mktemp("t5")),
        "umt5": save(
            tiny.random_model(tiny.umt5(**sizes), own_head=True), tmp_path_factory.mktemp("umt5")
        ),
    }


@pytest.fixture
def described(weights, tmp_path):
    """A function: a description to a folder of it and weights of its kind."""

    def make(description, **changes):
        description = {k: v for k, v in (description | changes).items() if v is not ...}
        source = weights[description["model_type"]]
        for name in ("model.safetensors", "tokenizer.json"):
            (tmp_path / name).symlink_to(source / name)
        (tmp_path / "config.json").write_text(json.dumps(description))
        return tmp_path

    return make


def test_the_first_t5(described):
    config = open_checkpoint(described(OLD_T5)).config
    assert (config.num_layers, config.encoder.num_layers) == (3, 2)
    assert (config.start_token, config.end_token) == (0, 1)
    assert config.tied_embeddings
    assert config.output_scale == 32**-0.5
    assert (config.activation, config.gated, config.attention_scale) == ("relu", False, 1.0)
    options = {"buckets": 32, "max_distance": 128, "per_layer": False}
    assert config.encoding.options == options | {"bidirectional": False}
    assert config.encoder.encoding.options == options | {"bidirectional": True}
    assert config.trained_context == 512


def test_umt5(described):
    config = open_checkpoint(described(UMT5, n_positions=..., num_decoder_layers=3)).config
    assert not config.tied_embeddings
    assert config.output_scale == 1.0
    assert (config.activation, config.gated) == ("gelu_tanh", True)
    assert config.encoding.options["per_layer"]
    assert config.trained_context == 512


def test_what_new_files_say_of_the_scale_counts(described):
    new = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert open_checkpoint(described(OLD_T5, **new)).config.output_scale == 1.0


def test_the_class_may_have_its_first_name(described):
    config = open_checkpoint(described(OLD_T5, architectures=["T5WithLMHeadModel"])).config
    assert config.tied_embeddings


def test_a_scale_that_umt5_as_published_does_not_have_is_told(described, caplog):
    caplog.set_level("INFO")
    config = open_checkpoint(described(UMT5, tie_word_embeddings=True)).config
    assert config.output_scale == 32**-0.5  # as transformers computes it
    assert "set it to false for a model that was published without" in caplog.text


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"decoder_start_token_id": 7}, 7),
        ({"decoder_start_token_id": ..., "pad_token_id": 5}, 5),
        ({"decoder_start_token_id": ..., "pad_token_id": ...}, 0),
    ],
)
def test_the_start_token(changes, start, described):
    folder = described(OLD_T5, **changes)
    assert open_checkpoint(folder).config.start_token == start
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 9}))
    assert open_checkpoint(folder).config.start_token == 9
    (folder / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 260}))
    with pytest.raises(CheckpointError, match="must be one token of the vocabulary"):
        open_checkpoint(folder)


def test_stops_are_the_declared_ones_and_the_tokenizers(described):
    assert open_checkpoint(described(OLD_T5)).stop_ids == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["T5EncoderModel"]}, "only T5ForConditionalGeneration"),
        ({"is_encoder_decoder": False}, "only the whole model is served"),
        ({"is_decoder": True}, "'is_decoder' = True is not supported"),
        ({"feed_forward_proj": "gated-swishglu"}, "feed_forward_proj 'gated-swishglu'"),
        ({"feed_forward_proj": "split-relu"}, "feed_forward_proj 'split-relu'"),
        ({"dense_act_fn": "silu"}, "dense_act_fn contradicts feed_forward_proj 'relu'"),
        ({"is_gated_act": True}, "is_gated_act contradicts"),
        ({"relative_attention_num_buckets": None}, "relative_attention_num_buckets is missing"),
        ({"relative_attention_num_buckets": 3}, "3 buckets are too few"),
        ({"relative_attention_max_distance": 16}, "16 is no more than the 16 distances"),
        ({"decoder_start_token_id": 260}, "must be one token of the vocabulary, not .260."),
        ({"eos_token_id": [1, 2]}, "eos_token_id must be one token"),
        ({"num_decoder_layers": 4}, "lacks tensor 'decoder.block.3"),
        ({"num_layers": 1}, "holds tensor 'encoder.block.1"),
        ({"tie_word_embeddings": False}, "lacks tensor 'lm_head.weight'"),
        ({"attention_window": 5}, "'attention_window' = 5 is not supported"),
    ],
)
def test_refusals(changes, words, described):
    with pytest.raises(CheckpointError, match=words) as refused:
        open_checkpoint(described(OLD_T5, **changes))
    assert "\n" not in str(refused.value)


def test_a_second_embedding_must_be_the_same(weights, tmp_path):
    tensors = load_file(weights["t5"] / "model.safetensors")
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((weights["t5"] / name).read_text())
    with pytest.raises(CheckpointError, match=r"decoder.embed_tokens.weight should be tied"):
        tiny.loaded(open_checkpoint(tmp_path))
