"""One tiny checkpoint of every decoder-only family, served and asked over HTTP.

12 greedy tokens equal those of transformers. The families' logits are compared in tests/model.
"""

import pytest

from ropewalk.model.architectures.base import architectures
from ropewalk.model.loading.checkpoints import open_checkpoint
from tests.model import checkpoints, plain
from tests.model.families import FAMILIES
from tests.model.test_parity import drawn, reference_greedy
from tests.server.fake_engine import loaded_app
from tests.server.toy import asking, spelled_apart

# Of each family the first row of the table, or one that has more to go wrong.
CONFIGS = {row.config.model_type: row.config for row in reversed(FAMILIES.values())} | {
    "mistral": checkpoints.mistral(sliding_window=7),
    "gemma2": checkpoints.gemma2(tie_word_embeddings=False),
    "xglm": plain.xglm(tie_word_embeddings=False),
    "bloom": plain.bloom(tie_word_embeddings=False),
    "falcon": plain.falcon(num_attention_heads=4, hidden_size=32, num_hidden_layers=1),
}
# test_encoder_decoder.py, test_saving.py, test_parity_files.py
ELSEWHERE = {"t5", "mt5", "umt5", "ropewalk", "gemma3", "mistral3"}
PROMPTS = [list(b"To be"), list(b"the rope is long, and the walk is longer")]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{family: (its folder, the model of transformers)}."""
    made = {}
    for name, config in CONFIGS.items():
        model = drawn(config)
        made[name] = checkpoints.save(model, tmp_path_factory.mktemp(name)), model
    return made


@pytest.fixture(scope="module")
def client(models):
    """Of one server with all of them."""
    sources = [f"{name}={folder}" for name, (folder, _) in models.items()]
    flags = ("--dtype", "float32", "--kv-memory", "64M", "--max-model-len", "100")
    with asking(loaded_app(*sources, *flags)) as client:
        yield client


def test_every_family_is_here():
    here = CONFIGS.keys() | ELSEWHERE
    assert {architecture.model_type for architecture in architectures()} <= here


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_are_those_of_transformers(name, client, models):
    folder, model = models[name]
    body = {"model": name, "prompt": PROMPTS, "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/completions", json=body | {"ignore_eos": True, "logprobs": 1})
    assert answer.status_code == 200, answer.text
    tokenizer = open_checkpoint(folder).tokenizer
    for choice, prompt in zip(answer.json()["choices"], PROMPTS, strict=True):
        theirs = reference_greedy(model, prompt, 12)
        assert len(set(theirs)) > 1  # one token again and again would agree too easily
        assert choice["logprobs"]["tokens"] == spelled_apart(tokenizer, theirs)
