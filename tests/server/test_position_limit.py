"""A model with a table of positions: what is past its end is refused, and said so."""

import pytest

from ropewalk.server.errors import CommandError, PromptTooLong
from tests.model import checkpoints, plain
from tests.server.fake_engine import load_one
from tests.server.recording import request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.save(plain.random_model(plain.gpt2()), tmp_path_factory.mktemp("gpt2"))


def load(folder, *flags):
    return load_one(folder, "--dtype", "float32", "--kv-memory", "8M", *flags)


def test_more_than_the_table_cannot_be_asked_for(folder):
    with pytest.raises(CommandError) as refused:
        load(folder, "--max-model-len", "161")
    assert "positions for only 160 tokens" in str(refused.value)
    assert "--max-model-len 161" in str(refused.value)


def test_a_prompt_past_the_table_is_refused_with_both_numbers(folder):
    engine = load(folder).engine
    with pytest.raises(PromptTooLong) as refused:
        engine.submit(request("long", [7] * 160, max_tokens=1))
    assert "160" in str(refused.value)


@pytest.mark.parametrize("encoding", ["nope", "alibi", "rope", "sinusoidal"])
def test_another_encoding_takes_the_place_of_the_table(encoding, folder):
    loaded = load(folder, "--encoding", encoding, "--max-model-len", "500")
    assert loaded.served.encoding == encoding
    assert loaded.served.max_context == 500
