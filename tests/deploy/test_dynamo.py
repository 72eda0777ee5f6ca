"""The worker for Dynamo, called as Dynamo calls it; a live one is in load_tests."""

import asyncio
import random
import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace

import pytest
from tokenizers import Tokenizer

import ropewalk
from ropewalk.load_tests.workload.prompts import WORDS
from ropewalk.model.tokenizers.loading import tokenizer_from_directory
from ropewalk.server.download import family
from ropewalk.server.errors import UsageError
from tests.deploy.files import ROOT

WORKER = ROOT / "deploy" / "dynamo" / "worker.py"


class InvalidArgument(Exception):
    pass


class EngineShutdown(Exception):
    pass


def stub(**names) -> ModuleType:
    module = ModuleType("dynamo")
    module.__dict__.update(names)
    return module


STUBS = {
    "dynamo": stub(),
    "dynamo.common": stub(),
    "dynamo.common.backend": stub(
        LLMEngine=object,
        EngineConfig=SimpleNamespace,
        LlmRegistration=SimpleNamespace,
        WorkerConfig=SimpleNamespace,
    ),
    "dynamo.common.backend.health_check": stub(build_health_check_payload=dict),
    "dynamo.common.backend.metrics": stub(register_engine_registry=None),
    "dynamo.common.backend.publisher": stub(ZmqSource=lambda *address: address),
    "dynamo.common.backend.run": stub(run=None),
    "dynamo.llm": stub(),
    "dynamo.llm.exceptions": stub(
        EngineShutdown=EngineShutdown, InvalidArgument=InvalidArgument, Unknown=RuntimeError
    ),
}


class Context:
    def __init__(self, name: str) -> None:
        self.id = lambda: name


@pytest.fixture(scope="module")
def worker():
    spec = spec_from_file_location("dynamo_worker", WORKER)
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        for name, made in STUBS.items():
            patched.setitem(sys.modules, name, made)
        spec.loader.exec_module(module)
    return module


PROMPT = list(range(100, 140))
WANTED = {
    "token_ids": PROMPT,
    "sampling_options": {"temperature": 0.0, "n": 1, "top_k": None},
    "stop_conditions": {"max_tokens": 12, "ignore_eos": True, "stop_token_ids_hidden": [2]},
}
LEFT = {**WANTED, "stop_conditions": {"ignore_eos": True}}  # by a client, after three chunks
IMPOSSIBLE = (
    {**WANTED, "sampling_options": {"temperature": -1}},
    {**WANTED, "sampling_options": {"n": 2}},
    {**WANTED, "sampling_options": {"guided_decoding": {"regex": "a"}}},
    {**WANTED, "output_options": {"logprobs": 2}},
    {**WANTED, "token_ids": [4096]},
    {**WANTED, "token_ids": PROMPT * 20},
)


async def answers(engine, number, request):
    """The chunks of a request, or its error."""
    chunks, context = [], Context(str(number))
    try:
        async for chunk in engine.generate(request, context):
            chunks.append(chunk)
            if request is LEFT and len(chunks) == 3:
                await engine.abort(context)
    except Exception as error:
        return error
    return chunks


async def run(worker):
    """What a worker says of itself, and its answers."""
    words = ["ropewalk-rope", "--tokenizer", "/t", "--kv-memory", "16M", "--namespace", "n"]
    engine, config = await worker.RopewalkEngine.from_args(words)
    registered, sources = await engine.start(7), await engine.kv_event_sources()
    requests = enumerate((WANTED, LEFT, *IMPOSSIBLE))
    found = await asyncio.gather(*(answers(engine, *each) for each in requests))
    for _ in range(2):  # as Dynamo may
        await engine.cleanup()
    return config, registered, sources, found


def test_a_worker_answers_as_a_server_does_and_is_found(worker):
    config, registered, sources, (chunks, left, *refused) = asyncio.run(run(worker))
    with ropewalk.load("ropewalk-rope", kv_memory="16M") as model:
        alone = model.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(alone.tokens)
    assert chunks[-1]["finish_reason"] == "length"
    assert all(chunk["index"] == 0 for chunk in chunks)
    assert chunks[-1]["completion_usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 12,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(left) < 100  # of some 470 tokens
    assert [type(each) for each in refused] == [InvalidArgument] * len(IMPOSSIBLE)
    assert registered.llm.max_num_batched_tokens == 512
    assert (config.namespace, config.model_name) == ("n", "/t")
    assert (registered.served_model_name, registered.llm.context_length) == ("ropewalk-rope", 512)
    assert registered.llm.kv_cache_block_size == 16 and registered.llm.total_kv_blocks > 32
    ((endpoint, topic),) = sources
    assert endpoint.startswith("tcp://127.0.0.1:") and topic == ""


def test_a_worker_whose_engine_failed_ends_and_sends_its_requests_elsewhere(worker, monkeypatch):
    ended = []
    monkeypatch.setattr(worker, "LAST_WORDS_S", 0)
    monkeypatch.setattr(worker.os, "_exit", ended.append)

    async def fail():
        words = ["ropewalk-rope", "--tokenizer", "/t", "--kv-memory", "16M"]
        engine, _ = await worker.RopewalkEngine.from_args(words)
        await engine.start(7)
        engine._engine._fail("as if a step had failed")
        found = await answers(engine, 1, WANTED)
        await engine.cleanup()
        return found

    assert isinstance(asyncio.run(fail()), EngineShutdown)
    assert ended == [worker.FAILED]


def test_options_of_the_http_side_are_refused(worker):
    words = ["ropewalk-rope", "--tokenizer", "/t", "--request-timeout", "9"]
    with pytest.raises(UsageError, match="--request-timeout is of the HTTP side"):
        asyncio.run(worker.RopewalkEngine.from_args(words))


def test_the_frontend_gets_the_tokenizer_of_the_bundled_models(tmp_path):
    runpy.run_path(str(WORKER.parent / "tokenizer.py"))["write"](tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_from_directory(family()[0].parent)
    words = random.Random(1).choices(WORDS, k=500)
    for text in (" ".join(words), "Once,  upon\n a time: 12 €!", "naïve 🦆"):
        tokens = ours.encode(text, bos=True)
        assert theirs.encode(text).ids == tokens
        assert theirs.decode(tokens) == text


def test_a_salt_keeps_prefixes_apart_and_is_one_that_dynamo_knows(worker):
    salted = {"token_ids": [1], "extra_args": {"nvext": {"cache_salt": "t"}}}
    assert worker.salt_of(salted) == "dynamo-cache-salt:t"
    assert worker.salt_of({"token_ids": [1]}) == ""
