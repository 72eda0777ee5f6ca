"""Embeddings are those that transformers' hidden states give, however a server computes them."""

import base64
import contextlib
import json
import time
from functools import cache

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch

from ropewalk.model.config import Embedding, Pooling
from ropewalk.model.loading.checkpoints import CheckpointError, open_checkpoint
from ropewalk.model.loading.embedding import embedding_from_gguf
from ropewalk.server.errors import CacheChanged
from tests.model import checkpoints, encoder_decoders, plain
from tests.model.test_parity import drawn, outputs_of, prompts
from tests.server.disturbed import load
from tests.server.fake_engine import counting, loaded_app, make_engine, make_request
from tests.server.toy import ScriptedEngine, ask, asking, running, sample, toy, toy_app, wait_for

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 96
MODELS = {  # rotary, rotary with windows, biases by distance, learned and fixed vectors
    "qwen3": checkpoints.qwen3(),
    "mistral": checkpoints.mistral(sliding_window=7),
    "bloom": plain.bloom(),
    "gpt2": plain.gpt2(),
    "opt-350m": plain.opt(do_layer_norm_before=False, word_embed_proj_dim=20),
    "xglm": plain.xglm(),
}
LENGTHS = (1, 2, 40, CONTEXT, 17, 65)  # one takes all of the context
WAYS = {
    "kernels": (),
    "torch": ("--attention", "reference"),
    "in chunks": ("--max-step-tokens", "24", "--max-seqs", "4"),
}


@cache
def states_of(model, tokens):
    return outputs_of(model, list(tokens))[1].double()


def expected(model, tokens, pooling="last", size=None, normalize=True):
    """By transformers, in float64."""
    states = states_of(model, tuple(tokens))
    vector = (states[-1] if pooling == "last" else states.mean(dim=0))[:size]
    return (vector / vector.norm() if normalize else vector).numpy()


def embed(client, **body):
    return client.post("/v1/embeddings", json=body)


def vectors(answer):
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [each["index"] for each in found["data"]] == list(range(len(found["data"])))
    return np.array([each["embedding"] for each in found["data"]])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {name: drawn(config) for name, config in MODELS.items()}
    return {
        name: (checkpoints.save(model, tmp_path_factory.mktemp("embedded")), model)
        for name, model in made.items()
    }


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory):
    model = encoder_decoders.random_model(encoder_decoders.umt5(), own_head=True)
    return checkpoints.save(model, tmp_path_factory.mktemp("both"))


@contextlib.contextmanager
def serving(sources, *flags):
    """A client of a server with these models."""
    common = ("--dtype", "float32", "--kv-memory", "64M", "--max-model-len", str(CONTEXT))
    app = loaded_app(*(f"{name}={folder}" for name, folder in sources.items()), *common, *flags)
    with asking(app) as client:
        client.metrics = app.state.metrics
        yield client


@pytest.fixture(scope="module", params=WAYS)
def client(request, models, encoder_decoder):
    sources = {name: folder for name, (folder, _) in models.items()}
    if request.param != "torch":
        sources["both"] = encoder_decoder
    with serving(sources, *WAYS[request.param]) as client:
        yield client


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_transformers(name, pooling, client, models):
    model = models[name][1]
    inputs = prompts(258, *LENGTHS)
    answer = embed(client, model=name, input=inputs, pooling=pooling)
    theirs = [expected(model, tokens, pooling) for tokens in inputs]
    np.testing.assert_allclose(vectors(answer), theirs, atol=2e-5)
    assert answer.json()["usage"]["prompt_tokens"] == sum(LENGTHS)
    # A prefix that is known shortens the work, but for a mean, which is of every row.
    again = embed(client, model=name, input=inputs[2], pooling=pooling)
    np.testing.assert_allclose(vectors(again), theirs[2:3], atol=2e-5)
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (32 if pooling is Pooling.LAST else 0)


def test_forms(client, models):
    """Of input and output: texts, ids, fewer dimensions, base64, and the real client."""
    model = models["qwen3"][1]
    text, ids = (
        "the rope",
        open_checkpoint(models["qwen3"][0]).tokenizer.encode("the rope", bos=True),
    )
    theirs = expected(model, ids)
    for given in (text, [text], ids, [ids]):
        found = vectors(embed(client, model="qwen3", input=given, user="me"))
        np.testing.assert_allclose(found, [theirs], atol=2e-5)
    short = embed(client, model="qwen3", input=text, dimensions=5, encoding_format="base64").json()
    data = base64.b64decode(short["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), expected(model, ids, size=5), atol=2e-5)
    real = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")  # asks for base64
    for options in ({}, {"encoding_format": "float"}):
        answer = real.embeddings.create(model="qwen3", input=[text, text], **options)
        np.testing.assert_allclose(answer.data[1].embedding, theirs, atol=2e-5)
        assert answer.usage.total_tokens == 2 * len(ids)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": [[1], []]}, "invalid_value", "input[1]"),
        ({"input": [1, "a"]}, "invalid_value", "input[1]"),
        ({"input": 3}, "invalid_value", "input"),
        ({"input": {"text": "a"}}, "invalid_value", "input"),
        ({"input": [9999]}, "invalid_value", "input"),
        ({"input": [1] * (CONTEXT + 1)}, "context_length_exceeded", "input"),
        ({"input": "a" * 5000}, "context_length_exceeded", "input"),
        ({"input": ["a"] * 1025}, "invalid_value", "input"),
        ({"dimensions": 0}, "invalid_value", "dimensions"),
        ({"dimensions": 41}, "invalid_value", "dimensions"),
        ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"pooling": "cls"}, "invalid_value", "pooling"),
        ({"temperature": 0}, "unknown_parameter", "temperature"),
        ({"model": "both"}, "unsupported_parameter", "model"),
        ({"model": "none"}, "model_not_found", "model"),
    ],
)
def test_refusals(client, change, code, param):
    if change.get("model") == "both" and "both" not in client.get("/v1/models").text:
        pytest.skip("served by the others")
    error = embed(client, **{"model": "qwen3", "input": "a"} | change).json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


def test_embeddings_are_counted(client):
    labels = {"model_name": "gpt2", "encoding": "learned"}

    def counts():
        ended = sample(client.metrics, "requests_total", finish_reason="stop", **labels)
        return ended, sample(client.metrics, "generated_tokens_total", **labels)

    ended, generated = counts()
    vectors(embed(client, model="gpt2", input=["a", "b"]))
    wait_for(lambda: counts() == (ended + 2, generated))


# ------------------------------------------------------------------------------ what a model says


def published(folder, *, normalize=True, pooling="pooling_mode_lasttoken", more=()):
    """Qwen3-Embedding's layout: a bare decoder, a closing token, modules.json."""
    model = drawn(checkpoints.qwen3(tie_word_embeddings=True))
    checkpoints.save(model.model, folder)
    tokenizer = checkpoints.tiny_tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {checkpoints.END}", special_tokens=[(checkpoints.END, 256)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *more]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, pooling: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags | {"include_prompt": True}))
    return model


def test_a_published_layout_is_followed(tmp_path):
    folders = {name: tmp_path / name for name in ("last", "mean", "cls", "dense")}
    for folder in folders.values():
        folder.mkdir()
    model = published(folders["last"])
    published(folders["mean"], pooling="pooling_mode_mean_tokens", normalize=False)
    published(folders["cls"], pooling="pooling_mode_cls_token")
    published(folders["dense"], more=["Dense"])
    ids = checkpoints.tiny_tokenizer().encode("to walk").ids
    with serving(folders) as client:
        theirs = expected(model, [*ids, 256])
        np.testing.assert_allclose(
            vectors(embed(client, model="last", input="to walk")), [theirs], atol=2e-5
        )
        found = vectors(embed(client, model="mean", input="to walk", add_special_tokens=False))
        raw = expected(model, ids, "mean", normalize=False)
        np.testing.assert_allclose(found, [raw], rtol=1e-3, atol=2e-5)
        for name in ("cls", "dense"):
            error = embed(client, model=name, input="to walk").json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", "pooling")
            assert len(vectors(embed(client, model=name, input="to walk", pooling="last"))) == 1
        # It still answers, from the tied head, and prompts get no closing token.
        body = {"model": "last", "prompt": "to walk", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == len(
            ids
        )


@pytest.mark.parametrize(
    "modules", ["[3]", "{}", '[{"type": "a.Pooling", "path": "../x"}]', "[", "3"]
)
def test_a_broken_layout_is_refused(tmp_path, modules):
    checkpoints.save(drawn(checkpoints.qwen3()), tmp_path)
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("kind", "found"),
    [(0, "last"), (1, "mean"), (2, None), (3, "last"), (True, "mean"), ("x", None)],
)
def test_gguf_says_how(kind, found):
    said = embedding_from_gguf({"general.architecture": "qwen3", "qwen3.pooling_type": kind})
    assert (said.why_not is None) == (found is not None)
    assert found in (None, said.pooling)


# --------------------------------------------------------------------------------- the engine


def wanting(name, tokens, pooling):
    return make_request(name, tokens, max_tokens=1, pooling=pooling)


def hiding(seen):
    """A fake model whose hidden states [S, 2] are each row's token and 1."""

    def forward(batch, kv):
        seen.append((batch.hidden, len(batch.output_rows), len(batch.tokens)))
        if not batch.hidden:
            return counting(batch, kv)
        own = batch.tokens[batch.output_rows].float()
        return torch.stack([own, torch.ones_like(own)], dim=1)

    return forward


def test_no_logits_and_no_steps_too_many():
    seen = []
    engine, _ = make_engine(hiding(seen), max_step_tokens=16)
    engine.submit(make_request("answer", [5, 6], max_tokens=3))
    engine.submit(wanting("last", range(1, 21), Pooling.LAST))
    engine.submit(wanting("mean", range(1, 9), Pooling.MEAN))
    ends = {}
    while engine.busy:
        for event in engine.step().events:
            if event.finish is not None:
                ends[event.request_id] = event
    assert ends["last"].embedding.tolist() == [20, 1]
    assert ends["mean"].embedding.tolist() == [36, 8]
    assert ends["last"].token is None and ends["answer"].embedding is None
    hidden = [(kept, rows) for hidden, kept, rows in seen if hidden]
    assert sum(rows for _, rows in hidden) == 28  # each row once
    assert sum(kept for kept, _ in hidden) == 1 + 8
    assert [kept for hidden, kept, _ in seen if not hidden] == [1, 1, 1]


def test_states_that_are_not_finite_fail_their_request_alone():
    def forward(batch, kv):
        states = hiding([])(batch, kv)
        return torch.where(states == 13, torch.nan, states)

    engine, _ = make_engine(forward)
    for name, tokens in {"bad": [4, 13], "good": [4, 12]}.items():
        engine.submit(wanting(name, tokens, Pooling.MEAN))
    events = {event.request_id: event for event in engine.step().events}
    assert events["bad"].error.code == "numerical_error"
    assert events["good"].embedding.tolist() == [16, 2]


@pytest.mark.parametrize("place", [0, 4, 200])
def test_a_preempted_embedding_is_the_same(place, tmp_path):
    """Beside answers that take the room; of a mean nothing is counted twice, and nothing missed."""
    model = drawn(checkpoints.qwen3())
    folder = checkpoints.save(model, tmp_path)
    flags = ("--dtype", "float32", "--max-step-tokens", "9", "--max-seqs", "5", "--kv-spill")
    block = 16 * load(folder, *flags, "0").facts.kv_bytes_per_token
    loaded = load(folder, *flags, str(place * block), "--kv-memory", str(21 * block))
    asked = {}
    for index, tokens in enumerate(prompts(258, *(20, 159, 20, 150, 20, 140) * 4)):
        name, pooling = f"r{index}", (Pooling.MEAN, Pooling.LAST)[index % 4 // 2]
        if index % 2:
            asked[name] = wanting(name, tokens, pooling)
        else:
            asked[name] = make_request(name, tokens, max_tokens=130)
    for request in asked.values():
        request.arrival = time.monotonic()
        loaded.engine.submit(request)
    preempted, found = set(), {}
    while loaded.engine.busy:
        for event in loaded.engine.step().events:
            assert event.error is None
            if event.embedding is not None:
                found[event.request_id] = event.embedding
        loaded.engine._manager.check()
        loaded.engine._scheduler.check()
    preempted = {name for name in found if asked[name].preemptions}
    assert {asked[name].pooling for name in preempted} == {*Pooling}
    assert len(found) == 12
    for name, total in found.items():
        request = asked[name]
        states = outputs_of(model, request.tokens)[1].double()
        theirs = states[-1] if request.pooling is Pooling.LAST else states.sum(dim=0)
        np.testing.assert_allclose(total, theirs.numpy(), atol=1e-2, rtol=1e-4)


def test_a_client_that_leaves_is_aborted():
    engine = ScriptedEngine(pause=60)
    app = toy_app(engine)
    with running(app) as (url, _):
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}, timeout=0.3)
        wait_for(lambda: len(engine.aborted) == 2)


@pytest.mark.parametrize("error", [CacheChanged("it changed"), RuntimeError("a bug")])
def test_an_engine_that_fails_is_said(error):
    engine = ScriptedEngine(failure_at=(1, error))
    answer = ask(toy_app(engine), "POST", "/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 500 and "error" in answer.json()


def test_a_toy_closes_texts_alone():
    """The closing tokens follow texts, not ids, and not where no special tokens are wanted."""
    engine = ScriptedEngine()
    app = toy_app(engine, [toy(embedding=Embedding(Pooling.MEAN))])
    for body in ({"input": "a"}, {"input": [97]}, {"input": "a", "add_special_tokens": False}):
        ask(app, "POST", "/v1/embeddings", json=body)
    assert [each.tokens for each in engine.requests] == [[257, 97, 256], [97], [97]]
    assert {each.pooling for each in engine.requests} == {Pooling.MEAN}
