"""From a configuration to loaded models: what is chosen, and what is refused in one sentence."""

import argparse
from dataclasses import replace

import pytest
import torch

from model.config import EncodingSpec
from server import placement
from server.build import load_models
from server.config import SERVE_OPTIONS, server_config
from server.errors import CommandError
from server.metrics import Metrics
from server.options import add_options, read_options
from server.request import Request
from tests.model.checkpoints import llama, random_model, save
from tests.model.tiny import CONFIG
from tests.server.fake_engine import make_request

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(random_model(llama()), tmp_path_factory.mktemp("tiny"))


def load(*flags):
    parser = argparse.ArgumentParser()
    add_options(parser, SERVE_OPTIONS)
    values = read_options(SERVE_OPTIONS, parser.parse_args(flags), {})
    return load_models(server_config(values), Metrics())


def generated(loaded, prompt):
    request: Request = make_request("a", prompt, max_tokens=8)
    loaded.engine.submit(request)
    while loaded.engine.busy:
        loaded.engine.step()
    return request.tokens[len(prompt) :]


def test_a_model_is_loaded_and_generates(folder):
    (loaded,) = load(f"m={folder}", "--kv-memory", "1M", "--dtype", "float32")
    assert (loaded.served.name, loaded.served.encoding) == ("m", "rope")
    assert loaded.served.max_context == loaded.facts.trained_context == 256
    assert loaded.served.vocab_size == 258  # the tokenizer's, smaller than the embedding's 260
    assert loaded.facts.attention == "cpu"
    # 2 · 3 layers · 2 heads · 10 float32, in blocks of 16 tokens, one of which is reserved.
    assert loaded.facts.kv_bytes_per_token == 480
    assert loaded.facts.blocks == (1 << 20) // (480 * 16) - 1
    assert len(generated(loaded, [1, 2, 3])) == 8


def test_backends_and_dtypes_agree(folder):
    answers = [
        generated(load(str(folder), "--kv-memory", "1M", *flags)[0], [5, 6, 7, 8])
        for flags in (
            ["--dtype", "float32"],
            ["--dtype", "float32", "--attention", "sdpa"],
            ["--dtype", "float32", "--attention", "reference"],
        )
    ]
    assert answers[0] == answers[1] == answers[2]


def test_another_encoding_is_an_experiment_one_can_ask_for(folder):
    (loaded,) = load(
        str(folder), "--kv-memory", "1M", "--encoding", "nope", "--max-model-len", "9k"
    )
    assert loaded.served.encoding == "nope"
    assert loaded.facts.trained_context == 256


def test_context_is_what_is_asked_for_and_what_the_cache_holds(folder, caplog):
    (shorter,) = load(str(folder), "--kv-memory", "1M", "--max-model-len", "100")
    assert shorter.served.max_context == 100
    (small,) = load(str(folder), "--kv-memory", "64K", "--dtype", "float32")
    assert small.served.max_context == (65536 // (480 * 16) - 1) * 16 + 1
    assert "raise --kv-memory" in caplog.text


def test_two_models_share_the_memory(folder):
    one, two = load(f"a={folder}", f"b={folder}", "--kv-memory", "1M", "--dtype", "float32")
    assert one.facts.blocks == two.facts.blocks == (1 << 19) // (480 * 16) - 1
    assert one.engine is not two.engine


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--encoding", "t6"], "There is no encoding 't6'"),
        (["--encoding", "rope", "--kv-memory", "1K"], "raise --kv-memory"),
        (["--dtype", "float16", "--attention", "cpu"], "it computes float32 and bfloat16"),
    ],
)
def test_refusals(folder, flags, words):
    with pytest.raises(CommandError) as refused:
        load(str(folder), *flags)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_in_vain():
    with pytest.raises(CommandError, match="use --device cpu"):
        placement.pick_device("cuda")


def blocks(**changes):
    chosen = {"budget": None, "free_memory": GIB, "block_size": 16, "max_seqs": 4, "context": 256}
    config = replace(CONFIG, encoding=EncodingSpec("nope", {}))
    return placement.num_blocks(config, torch.float32, **chosen | changes)


def test_blocks_stop_at_what_all_sequences_need():
    assert blocks() == 4 * 16 + 1
    assert blocks(budget=GIB) == GIB // (2 * 3 * 2 * 8 * 4 * 16)
    with pytest.raises(CommandError, match="needs two"):
        blocks(budget=100)
