"""Random decoders of a realistic shape: alike but for the encoding, and as long as one asks."""

import json

import pytest
import torch

from ropewalk.model.encodings.base import EncodingError, create, names
from ropewalk.model.loading.checkpoints import CheckpointError, load_program
from ropewalk.model.loading.random_weights import CONTEXT, SHAPES, RandomWeights, random_checkpoint
from tests.model.encoder_decoders import t5
from tests.model.running import CPU, run_uncached
from tests.model.tiny import in_torch, parameters_of

MIXED = {
    "model_type": "llama",
    "vocab_size": 90,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def made(source, encoding=None, context=None):
    """The decoder with its weights, as a server would make it, without kernels."""
    checkpoint = random_checkpoint(source, encoding, context)
    config = checkpoint.config
    own = create(config.encoding, config, config.trained_context, CPU)
    return in_torch(load_program(checkpoint, own, dtype=torch.float32, device=CPU))


@pytest.fixture(scope="module")
def decoders():
    return {name: made("shape:small", name) for name in names()}


def test_weights_differ_in_nothing_but_the_encodings_own(decoders) -> None:
    plain = parameters_of(decoders["nope"])
    for decoder in decoders.values():
        found = parameters_of(decoder)
        assert {name for name in found if not name.startswith("encoding.")} == plain.keys()
        assert all(torch.equal(found[name], weights) for name, weights in plain.items())


def test_logits_are_of_a_usual_size_under_every_encoding(decoders) -> None:
    tokens = torch.randint(4096, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    for name, decoder in decoders.items():
        deviation = run_uncached(decoder, tokens).std(dim=-1)
        assert (deviation > 0.5).all() and (deviation < 2.0).all(), name


def test_no_two_tensors_are_alike() -> None:
    weights = RandomWeights({"a": (3, 4), "b": (3, 4), "b.bias": (4,), "b.weight": (4,)})
    assert torch.equal(weights.read("a"), weights.read("a"))
    assert not torch.equal(weights.read("a"), weights.read("b"))
    assert weights.read("b.bias").tolist() == [0] * 4
    assert weights.read("b.weight").tolist() == [1] * 4


@pytest.mark.parametrize("context", [None, 50, 20_000])
def test_positions_are_as_many_as_are_asked_for(context) -> None:
    checkpoint = random_checkpoint("shape:small:learned", None, context)
    assert checkpoint.config.trained_context == (context or CONTEXT)
    assert checkpoint.weights.read("encoding.table").shape == (context or CONTEXT, 256)


@pytest.mark.parametrize(
    ("shape", "millions"), [("small", 4), ("smollm2", 135), ("llama-1b", 1236)]
)
def test_shapes_are_as_large_as_the_models_they_are_named_after(shape, millions) -> None:
    found = random_checkpoint(f"shape:{shape}", "nope", None).weights
    sizes = [torch.Size(found.shape(name)).numel() for name in found.names()]
    assert round(sum(sizes) / 1e6) == millions
    assert SHAPES[shape].vocab_size in (4096, 49152, 128256)


def test_a_shape_of_a_config_file(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXED))
    own = random_checkpoint(f"shape:{path}", None, None)
    assert own.config.encoding.options["base"] == 500.0
    assert (own.config.trained_context, own.config.num_kv_heads) == (64, 2)
    assert own.tokenizer.vocab_size == 90
    other = random_checkpoint(f"shape:{path}:t5", None, 99)
    assert (other.config.encoding.name, other.config.trained_context) == ("t5", 99)
    assert run_uncached(made(f"shape:{path}"), [1, 2, 3]).shape == (3, 90)


def test_what_is_asked_for_beside_the_source_wins() -> None:
    assert random_checkpoint("shape:small:t5", "alibi", None).config.encoding.name == "alibi"
    assert random_checkpoint("shape:small", None, None).config.encoding.name == "rope"


def test_an_encoding_from_outside() -> None:
    source = "shape:small:tests.model.tiny:Table"
    assert random_checkpoint(source, None, None).config.encoding.name == "tests.model.tiny:Table"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("shape:large", CheckpointError, "use tiny, small, smollm2, llama-1b or the path"),
        ("shape:", CheckpointError, "use tiny, small, smollm2, llama-1b or the path"),
        ("shape:small:t6", EncodingError, "There is no encoding 't6'"),
    ],
)
def test_refusals(source, error, words) -> None:
    with pytest.raises(error, match=words):
        random_checkpoint(source, None, None)


def test_an_encoder_is_not_served_without_its_weights(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(t5().to_json_string())
    with pytest.raises(CheckpointError, match="has an encoder, too; use"):
        random_checkpoint(f"shape:{path}", None, None)
