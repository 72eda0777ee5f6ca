"""The payloads real clients send, and what they read from the answers; and the openai package.

Each payload has exactly the fields its client sends. The readers below take from an answer what
that client takes, and nothing else.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ropewalk.server.errors import QueueFull, RequestFailed
from tests.server.fake_engine import VOCAB, counting, engine_app, make_engine
from tests.server.toy import ScriptedEngine, running, toy, toy_app

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine):
    with running(toy_app(engine)) as (address, _):
        yield address


@pytest.fixture(autouse=True)
def plain_engine(engine):
    yield
    engine.refuse = engine.failure_at = None
    engine.requests.clear()


def stream(url: str, path: str, payload: dict, headers: dict | None = None) -> list[dict]:
    """As the benchmarks read: events split at blank lines, comments skipped, [DONE] at the end."""
    with httpx.stream("POST", url + path, json=payload, headers=headers) as response:
        assert response.status_code == 200, response.read()
        messages = response.read().decode().strip().split("\n\n")
    messages = [message for message in messages if not message.startswith(":")]
    assert messages[-1] == "data: [DONE]"
    return [json.loads(message.removeprefix("data: ")) for message in messages[:-1]]


def benchmark(chunks: list[dict], text) -> tuple[str, int]:
    """Text and output tokens, as `vllm bench serve` gathers them."""
    said, count, first = "", 0, False
    for chunk in chunks:
        if choices := chunk.get("choices"):
            first = True
            said += text(choices[0]) or ""
        elif usage := chunk.get("usage"):
            count = usage["completion_tokens"]
    assert first
    return said, count


def text_of(choice: dict) -> str:
    return choice["text"]


def delta_of(choice: dict) -> str:
    return choice["delta"].get("content")


def test_vllm_bench_serve_completions(url, engine):
    models = httpx.get(url + "/v1/models").json()
    assert models["data"][0]["id"] == models["data"][0]["root"] == "toy"
    payload = {
        "model": "toy",
        "prompt": "Once upon a time",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        **USAGE,
        "ignore_eos": True,
    }
    headers = {"x-request-id": "bench-0-7"}
    chunks = stream(url, "/v1/completions", payload, headers)
    assert benchmark(chunks, text_of) == ("Hello, w", 8)
    assert engine.requests[0].params.stop_ids == frozenset()


def test_vllm_bench_serve_chat(url):
    payload = {
        "model": "toy",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Once"}]}],
        "max_completion_tokens": 8,
        **USAGE,
        "ignore_eos": True,
    }
    chunks = stream(url, "/v1/chat/completions", payload)
    assert benchmark(chunks, delta_of) == ("Hello, w", 8)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_guidellm(url, limit):
    assert httpx.get(url + "/health").status_code == 200
    model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    shared = {
        "model": model,
        "stream": True,
        "stream_options": options,
        limit: 6,
        "stop": None,
        "ignore_eos": True,
    }
    completion = stream(url, "/v1/completions", {**shared, "prompt": "Once upon"})
    messages = [{"role": "user", "content": [{"type": "text", "text": "Once upon"}]}]
    talk = stream(url, "/v1/chat/completions", {**shared, "messages": messages})
    for chunks in (completion, talk):
        assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
        last = chunks[-1]["usage"]
        assert last["completion_tokens"] == 6
        assert last["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_aiperf(url, limit):
    extra = {"ignore_eos": True, "min_tokens": 6}
    payload = {"prompt": ["Once upon"], "model": "toy", limit: 6, **extra, **USAGE}
    chunks = stream(url, "/v1/completions", payload)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert benchmark(chunks, text_of) == ("Hello,", 6)
    messages = [{"role": "user", "name": "aiperf", "content": "Once upon"}]
    payload = {"messages": messages, "model": "toy", limit: 6, **extra, **USAGE}
    assert benchmark(stream(url, "/v1/chat/completions", payload), delta_of)[1] == 6


def test_sglang_bench_serving(url):
    payload = {
        "model": "toy",
        "prompt": "Once upon",
        "temperature": 0.0,
        "best_of": 1,
        "max_tokens": 5,
        "stream": True,
        "ignore_eos": True,
    }
    # It reads the text of the first choice of every event, the last one included.
    assert "".join(chunk["choices"][0]["text"] for chunk in stream(url, "/v1/completions", payload))
    whole = httpx.post(url + "/v1/completions", json=payload | {"stream": False}).json()
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("Hello", 5)
    del payload["best_of"], payload["ignore_eos"]
    talk = {"messages": [{"role": "user", "content": payload.pop("prompt")}], **payload}
    chunks = stream(url, "/v1/chat/completions", talk)
    assert "".join(delta_of(chunk["choices"][0]) for chunk in chunks) == "Hello"


def test_lm_eval_loglikelihood(url):
    contexts = [3, 2]
    payload = {
        "model": "toy",
        "prompt": [[10, 20, 30, 40, 50], [60, 70, 80]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(url + "/v1/completions", json=payload).json()
    found = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, context in zip(choices, contexts, strict=True):
        scores = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))
        found.append((len(scores), sum(scores), greedy))
    assert found == [(2, -1.0, True), (1, -0.5, True)]


def test_lm_eval_generation(url):
    payload = {
        "prompt": [[72, 73], [74]],
        "model": "toy",
        "max_tokens": 32,
        "temperature": 0,
        "stop": ["Question:", "</s>", ", w"],
        "seed": 1234,
        "top_p": 0.9,
    }
    answer = httpx.post(url + "/v1/completions", json=payload).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Hello", "Hello"]
    talk = {
        "messages": [{"role": "user", "content": "x", "type": "text"}],
        "model": "toy",
        "max_tokens": 32,
        "temperature": 0,
        "stop": [", w"],
        "seed": 1234,
    }
    answer = httpx.post(url + "/v1/chat/completions", json=talk).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"


def test_the_gateway(url):
    whole = httpx.post(
        url + "/v1/completions",
        json={"model": "toy", "prompt": "Say this is a test", "max_tokens": 7, "temperature": 0},
    )
    assert whole.json()["usage"]["total_tokens"] > 7
    talk = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}
    assert httpx.post(url + "/v1/chat/completions", json=talk).status_code == 200
    page = httpx.get(url + "/metrics").text
    for name in ("requests_waiting", "requests_running", "kv_cache_usage_ratio", "cache_info"):
        assert f"\nropewalk_{name}{{" in page


@pytest.fixture(scope="module")
def openai():
    """Here, since it takes a second: one worker of several needs it."""
    import openai

    return openai


@pytest.fixture
def client(openai, url):
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as one:
        yield one


def test_openai_completions(client):
    whole = client.completions.create(
        model="toy", prompt="a", max_tokens=5, logprobs=1, echo=True, n=2, seed=1, user="eve"
    )
    assert [choice.text for choice in whole.choices] == ["aHello"] * 2
    assert whole.choices[0].logprobs.tokens[-1] == "o"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    pieces = client.completions.create(
        model="toy",
        prompt=[1, 2],
        max_tokens=5,
        stream=True,
        stop=["lo"],
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hel"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 5


def test_openai_chat(client):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(
        model="toy", messages=messages, max_completion_tokens=5, logprobs=True, top_logprobs=2,
        response_format={"type": "text"}, tools=[], metadata={"a": "b"}, store=False,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert whole.choices[0].message.content == "Hello"
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    # What came back can be sent on, as conversations do.
    messages += [whole.choices[0].message, {"role": "user", "content": "and?"}]
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=messages, max_tokens=5, stream=True, n=2
        )
    )
    assert {chunk.choices[0].delta.role for chunk in chunks[:2]} == {"assistant"}
    said = ["", ""]
    for chunk in chunks:
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == ["Hello", "Hello"]


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "ropewalk"


def test_openai_errors(openai, client, engine):
    def ask_for(**changes):
        return client.completions.create(**{"model": "toy", "prompt": "a", **changes})

    with pytest.raises(openai.BadRequestError) as refused:
        ask_for(temperature=3)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError) as refused:
        ask_for(extra_body={"frobnicate": 1})
    assert refused.value.code == "unknown_parameter"
    with pytest.raises(openai.BadRequestError) as refused:
        ask_for(prompt=[1] * 1000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        ask_for(model="other")
    engine.refuse = QueueFull("the queue is full; retry later")
    with pytest.raises(openai.RateLimitError):
        ask_for()
    engine.refuse = None
    engine.failure_at = (1, RequestFailed("logits are not finite"))
    with pytest.raises(openai.InternalServerError):
        ask_for()


def test_openai_does_not_repeat_a_request_that_failed(openai, url, engine):
    engine.failure_at = (1, RequestFailed("logits are not finite"))
    with (
        openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=2) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.completions.create(model="toy", prompt="a")
    assert len(engine.requests) == 1


def test_openai_sees_a_stream_that_failed(openai, client, engine):
    engine.failure_at = (4, RequestFailed("logits are not finite"))
    said = ""
    with pytest.raises(openai.APIError, match="not finite"):
        for chunk in client.completions.create(model="toy", prompt="a", stream=True):
            said += chunk.choices[0].text
    assert said == "Hel"


def test_openai_keys(openai):
    with running(toy_app(api_keys=frozenset({"sesame"}))) as (url, _):
        for key in ("sesame", "wrong"):
            with openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
                if key == "sesame":
                    assert client.models.list().data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


def test_openai_clients_that_find_the_queue_full_come_back_when_there_is_room(openai):
    def slow(batch, kv):
        time.sleep(0.15)
        return counting(batch, kv)

    real, _ = make_engine(slow, max_seqs=1, max_queue=1)
    served = toy(vocab_size=VOCAB, max_context=100, max_at_once=2, stop_ids=frozenset())
    together = threading.Barrier(5)

    def ask(index: int) -> int:
        with openai.OpenAI(base_url=url + "/v1", api_key="unused") as client:
            together.wait()
            answer = client.completions.create(model="toy", prompt=[index + 1], max_tokens=8)
            return answer.usage.completion_tokens

    with running(engine_app(real, served)) as (url, _), ThreadPoolExecutor(5) as clients:
        assert list(clients.map(ask, range(5))) == [8] * 5
