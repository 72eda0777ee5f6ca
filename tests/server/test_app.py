"""Routes over a scripted engine: shapes of answers, defaults, refusals, statuses and headers."""

import json
from functools import partial

import pytest

from ropewalk.model.sampling import SamplingParams
from ropewalk.server.errors import QueueFull, RequestFailed, ShuttingDown
from ropewalk.server.openai import requests
from ropewalk.server.scheduling.request import FinishReason
from tests.products import pairs
from tests.server.toy import (
    BEGIN,
    CONTEXT,
    END,
    LABELS,
    VOCABULARY,
    ByteTokenizer,
    ScriptedEngine,
    ask,
    chat,
    complete,
    error_of,
    events,
    rejected,
    sample,
    toy,
    toy_app,
)

CHOICE = {"index": 0, "logprobs": None, "stop_reason": None}


def test_a_whole_completion():
    response = complete(toy_app(), max_tokens=5)
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "toy",
        "choices": [CHOICE | {"text": "Hello", "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 5,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_streamed_completion():
    response = complete(
        toy_app(), max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    chunks = events(response.text)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [CHOICE | {"text": "H", "finish_reason": None}],
        [CHOICE | {"text": "e", "finish_reason": None}],
        [CHOICE | {"text": "l", "finish_reason": "length"}],
        [],
    ]
    assert chunks[-1]["usage"]["total_tokens"] == 7
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_a_whole_chat():
    body = chat(toy_app(), max_tokens=5).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello"}
    assert body["choices"] == [CHOICE | {"message": message, "finish_reason": "length"}]


def test_a_streamed_chat():
    chunks = events(chat(toy_app(), max_tokens=2, stream=True).text)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "e"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]


def test_the_chat_template_makes_the_prompt():
    engine = ScriptedEngine()
    chat(toy_app(engine), max_tokens=1, messages=[{"role": "user", "content": "hé"}])
    assert bytes(engine.requests[0].tokens).decode() == "<user>hé\n<assistant>"


def test_chat_without_a_template_is_refused():
    error = error_of(chat(toy_app(served=[toy(chat_template=None)])), 400)
    assert error["code"] == "unsupported_parameter" and "/v1/completions" in error["message"]


def test_tokens_pending_together_are_one_chunk():
    engine = ScriptedEngine(batch=4)
    chunks = events(complete(toy_app(engine), max_tokens=6, stream=True).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hell", "o,"]


def test_continuous_usage():
    options = {"include_usage": True, "continuous_usage_stats": True}
    for send in (complete, chat):
        chunks = events(send(toy_app(), max_tokens=2, stream=True, stream_options=options).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[-3:] == [1, 2, 2]
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_n_choices_and_several_prompts_interleave():
    engine = ScriptedEngine(lambda request: [*request.tokens[1:], ord("!")])
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3}
    whole = complete(toy_app(engine), **body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"]] == ["ab!", "ab!", "cd!", "cd!"]
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["completion_tokens"] == 12
    assert len({request.id for request in engine.requests}) == 4
    chunks = events(complete(toy_app(engine), stream=True, **body).text)
    texts = ["", "", "", ""]
    order = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        order.append(choice["index"])
        texts[choice["index"]] += choice["text"]
    assert texts == ["ab!", "ab!", "cd!", "cd!"]
    assert order != sorted(order)
    assert engine.live == 0


def test_cached_tokens_are_told_once_per_prompt():
    engine = ScriptedEngine(cached=2)
    usage = complete(toy_app(engine), prompt=["ab", "cd"], n=3, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_token_ids_reach_the_engine_unchanged():
    engine = ScriptedEngine()
    app = toy_app(engine)
    complete(app, prompt=[7, VOCABULARY - 1], max_tokens=1)
    complete(app, prompt="ab", max_tokens=1)
    complete(app, prompt="ab", max_tokens=1, add_special_tokens=False)
    assert [request.tokens for request in engine.requests] == [
        [7, VOCABULARY - 1],
        [BEGIN, 97, 98],
        [97, 98],
    ]


def test_parameters_reach_the_engine():
    engine = ScriptedEngine()
    alike = {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1}
    alike |= {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 1}
    alike |= {"seed": 11, "logprobs": 2}
    complete(toy_app(engine), top_k=-1, stop_token_ids=[5], logit_bias={"7": -100}, **alike)
    expected = {"top_k": 0, "stop_ids": {5, END}, "logit_bias": {7: -100}} | alike
    assert engine.requests[0].params == SamplingParams(**expected)


def test_defaults():
    engine = ScriptedEngine()
    app = toy_app(engine)
    complete(app)
    complete(app, prompt="x" * (CONTEXT - 5))
    chat(app)
    complete(app, ignore_eos=True, stop_token_ids=[5])
    completion, near_the_end, talk, endless = engine.requests
    assert completion.params.max_tokens == 16
    assert near_the_end.params.max_tokens == 4
    assert talk.params.max_tokens == CONTEXT - talk.num_prompt
    assert (completion.params.temperature, completion.params.top_k) == (1.0, 0)
    assert (completion.params.logprobs, completion.params.seed) == (None, None)
    assert completion.params.stop_ids == {END}
    assert endless.params.stop_ids == {5}


def test_a_seed_gives_each_choice_its_own_numbers_again():
    engine = ScriptedEngine()
    app = toy_app(engine)
    for seed in (3, 3, 4, None, None):
        complete(app, seed=seed, n=2, max_tokens=1)
    draws = [request.rng.random() for request in engine.requests]
    assert draws[0:2] == draws[2:4]
    assert len(set(draws)) == 8


def test_a_prompt_has_the_same_numbers_wherever_it_is_in_a_list():
    engine = ScriptedEngine()
    complete(toy_app(engine), prompt=["a", "b", "a"], seed=3, n=2, max_tokens=1)
    draws = [request.rng.random() for request in engine.requests]
    assert draws[0:2] == draws[2:4] == draws[4:6] and draws[0] != draws[1]


def test_a_model_token_ends_the_text_and_counts_as_usage():
    engine = ScriptedEngine(lambda request: [*b"ab", END, *b"cd"])
    body = complete(toy_app(engine), logprobs=0).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)
    assert body["usage"]["completion_tokens"] == 3
    assert choice["logprobs"]["tokens"] == ["a", "b", "<end>"]


def test_a_stop_token_of_the_client_is_named():
    (choice,) = complete(toy_app(), stop_token_ids=[ord("o")]).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hell", "stop")
    assert choice["stop_reason"] == ord("o")
    body = {"stop_token_ids": [ord("o")], "include_stop_str_in_output": True}
    (choice,) = complete(toy_app(), **body).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("Hello", ord("o"))


SAID = [  # by the model; the strings that end the text, which that is, and the one that did
    (b"hello", [], "hello", ""),
    ("Grüße, 世界! 😀😀 ende".encode(), [], "Grüße, 世界! 😀😀 ende", ""),
    ("ab\ufffdcd".encode(), [], "ab\ufffdcd", ""),
    ("a\n\n: ping\n\ndata: x\u2028".encode(), [], "a\n\n: ping\n\ndata: x\u2028", ""),
    ("x世".encode()[:-1], [], "x\ufffd", ""),
    (b"Hello, world! " * 4, ["wor", "zzz"], "Hello, ", "wor"),
    (b"aaab", ["aab"], "a", "aab"),
    (b"ends with thr", ["three"], "ends with thr", ""),
    ("x世y".encode(), ["世"], "x", "世"),
]


@pairs(said=SAID, stream=[False, True], batch=[1, 2, 3, 7, 50], n=[1, 2])
def test_a_text_is_the_same_however_its_tokens_come(said, stream, batch, n):
    data, stop, text, stopped_by = said
    engine = ScriptedEngine(lambda request: data, batch=batch)
    body = {"stop": stop, "max_tokens": len(data), "n": n, "stream": stream}
    response = complete(toy_app(engine), **body)
    chunks = events(response.text) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(n):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in own]
        end = ("stop", stopped_by) if stopped_by else ("length", None)
        assert ends == [(None, None)] * (len(own) - 1) + [end]
    used = len((text + stopped_by).encode()) if stopped_by else len(data)
    assert stream or response.json()["usage"]["completion_tokens"] == used * n
    assert engine.live == 0
    # Unless the engine had already ended it by itself:
    cut = n if -(-used // batch) * batch < len(data) else 0
    assert [request.abort_as for request in engine.aborted] == [FinishReason.STOP] * cut


def test_the_stop_string_may_be_included():
    (choice,) = complete(toy_app(), stop="wor", include_stop_str_in_output=True).json()["choices"]
    assert choice["text"] == "Hello, wor"


def test_logprobs_of_a_completion():
    (choice,) = complete(toy_app(), max_tokens=3, logprobs=2).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "tokens": ["H", "e", "l"],
        "top_logprobs": [{"H": -0.5, "I": -2.0}, {"e": -0.5, "f": -2.0}, {"l": -0.5, "m": -2.0}],
    }
    assert choice["text"] == "Hel"


def test_refusals_name_no_class_of_the_server():
    for error in (
        error_of(chat(toy_app(), messages=[1]), 400),
        error_of(complete(toy_app(), stream=True, stream_options=1), 400),
    ):
        assert error["message"].endswith(" should be a JSON object")


class Spacing(ByteTokenizer):
    """Adds a space before each token but the first of a text."""

    def token_bytes(self, token, *, first):
        data = super().token_bytes(token, first=first)
        return data if first or not data else b" " + data


class Marking(ByteTokenizer):
    """# marks the end of a text."""

    def encode(self, text, *, bos):
        return [END if byte == ord("#") else byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "answer", "text", "tokens", "offsets"),
    [
        # The first token begins the text; three bytes make one character.
        (ByteTokenizer(), "xé", "a日b".encode(), "xéa日b",
         ["", "x", "", "é", "a", "", "", "日", "b"], [0, 0, 1, 1, 2, 3, 3, 3, 4]),
        # The answer's first byte would complete the prompt's last.
        (ByteTokenizer(), [120, 0xC3], b"\xa9b", "x\ufffd\ufffdb",
         ["x", "\ufffd", "\ufffd", "b"], [0, 1, 2, 3]),
        # The answer's space is its own, the prompt's were not in its text.
        (Spacing(), "ab", b"H", "ab H", ["", "a", "b", " H"], [0, 0, 1, 2]),
        (Marking(), "#a#", b"He", "#a#He", ["#", "a", "#", "H", "e"], [0, 1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_text_offsets_count_characters_of_the_text(
    tokenizer, prompt, answer, text, tokens, offsets
):
    app = toy_app(ScriptedEngine(lambda request: answer), [toy(tokenizer=tokenizer)])
    asked = {"prompt": prompt, "echo": True, "max_tokens": len(answer), "logprobs": 1}
    (choice,) = complete(app, **asked).json()["choices"]
    scores = choice["logprobs"]
    assert (choice["text"], scores["tokens"], scores["text_offset"]) == (text, tokens, offsets)


def test_streamed_logprobs_join_to_the_whole_ones():
    app = toy_app()
    whole = complete(app, max_tokens=5, logprobs=1, echo=True).json()["choices"][0]
    chunks = events(complete(app, max_tokens=5, logprobs=1, echo=True, stream=True).text)
    for name, expected in whole["logprobs"].items():
        joined = [item for chunk in chunks for item in chunk["choices"][0]["logprobs"][name]]
        assert joined == expected


def test_logprobs_of_a_chat():
    (choice,) = chat(toy_app(), max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "H",
                "logprob": -0.5,
                "bytes": [72],
                "top_logprobs": [
                    {"token": "H", "logprob": -0.5, "bytes": [72]},
                    {"token": "I", "logprob": -2.0, "bytes": [73]},
                ],
            }
        ]
    }


def test_echo_repeats_the_prompt_with_its_scores():
    app = toy_app()
    (choice,) = complete(app, prompt=[97, 98, 99], echo=True, logprobs=1, max_tokens=1).json()[
        "choices"
    ]
    assert choice["text"] == "abcH"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "b", "c", "H"]
    assert scores["text_offset"] == [0, 1, 2, 3]
    assert scores["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert scores["top_logprobs"][0] is None
    assert (
        complete(app, prompt="xy", echo=True, max_tokens=2).json()["choices"][0]["text"] == "xyHe"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_is_scored_without_an_answer(n, stream):
    """As evaluations ask, of which some want no token besides."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    asked = {"echo": True, "logprobs": 1, "max_tokens": 0, "n": n, "stream": stream} | options
    answer = complete(toy_app(), prompt=["abc", "xy"], **asked)
    found = events(answer.text) if stream else [answer.json()]
    choices = [choice for each in found for choice in each["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in choices) == list(range(2 * n))
    assert {choice["text"] for choice in choices} == {"abc", "xy"}
    for choice in choices:
        assert choice["finish_reason"] == "length"
        scores = choice["logprobs"]
        assert scores["tokens"] == ["", *choice["text"]]  # the first begins every text
        assert scores["token_logprobs"] == [None] + [-0.5] * len(choice["text"])
    assert found[-1]["usage"]["completion_tokens"] == 0
    assert found[-1]["usage"]["prompt_tokens"] == 7


def test_more_scores_than_memory_is_meant_for_are_refused(monkeypatch):
    monkeypatch.setattr(requests, "MAX_SCORES", 30)
    asked = {"echo": True, "logprobs": 1, "max_tokens": 0}
    assert complete(toy_app(), prompt=["abcd", "abcd"], **asked).status_code == 200
    refused = complete(toy_app(), prompt=["abcd", "abcd"], n=2, **asked)
    assert "40 log-probabilities, more than the limit of 30" in error_of(refused, 400)["message"]
    assert complete(toy_app(), prompt=["abcd", "abcd"], n=2, max_tokens=1).status_code == 200


def test_models():
    served = [toy("org/a"), toy("b", max_context=64, encoding="nope")]
    app = toy_app(served=served)
    body = ask(app, "GET", "/v1/models").json()
    assert body["object"] == "list"
    assert [(one["id"], one["root"], one["max_model_len"]) for one in body["data"]] == [
        ("org/a", "org/a", CONTEXT),
        ("b", "b", 64),
    ]
    one = ask(app, "GET", "/v1/models/org/a").json()
    assert one == body["data"][0]
    assert (one["object"], one["encoding"], one["parameters"]) == ("model", "rope", 7)
    assert (one["chat"], one["encoder_decoder"]) == (True, False)
    assert error_of(ask(app, "GET", "/v1/models/a"), 404)["code"] == "model_not_found"


def test_every_served_name_is_answered_with_the_first():
    app = toy_app(served=[toy("toy", aliases=("gpt-4", "org/toy"))])
    listed = ask(app, "GET", "/v1/models").json()["data"]
    assert [(one["id"], one["root"]) for one in listed] == [
        ("toy", "toy"),
        ("gpt-4", "toy"),
        ("org/toy", "toy"),
    ]
    assert ask(app, "GET", "/v1/models/org/toy").json() == listed[2]
    for name in ("toy", "gpt-4", "org/toy", None):
        assert complete(app, model=name).json()["model"] == "toy"
    assert error_of(complete(app, model="gpt-5"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("prefix", ["/llm", "/a/b"])
def test_a_proxys_prefix_is_no_part_of_the_path(prefix):
    app = toy_app(root_path=prefix, api_keys=frozenset({"sesame"}))
    key = {"authorization": "Bearer sesame"}
    for path in ("/v1/models", "/metrics"):
        for where in (path, prefix + path):
            assert ask(app, "GET", where, headers=key).status_code == 200
            error_of(ask(app, "GET", where), 401)
        for where in (f"{prefix}x{path}", f"/other{path}", prefix + prefix + path):
            assert ask(app, "GET", where, headers=key).status_code == 404
    assert ask(app, "GET", prefix + "/health").status_code == 200  # open there, too
    assert ask(app, "GET", prefix, headers=key).status_code == 404


def test_a_proxys_prefix_may_be_how_paths_begin():
    app = toy_app(root_path="/v1")
    for path in ("models", "v1/models", "models/", "health", "metrics"):
        assert ask(app, "GET", f"/v1/{path}").status_code == 200
    assert ask(app, "GET", "/health").status_code == 200
    assert complete(app).status_code == 200
    assert ask(app, "GET", "/v1/v1/v1/models").status_code == 404


def test_the_path_that_was_meant_is_one_behind_the_proxy():
    said = error_of(ask(toy_app(root_path="/llm"), "GET", "/llm/models"), 404)["message"]
    assert "did you mean '/llm/v1/models'?" in said


@pytest.mark.parametrize(
    "name", ["", "TOY", "toy/", "../toy", "http://x/toy", "x" * 10_000, "toy\0"]
)
def test_model_names_match_exactly(name):
    error = error_of(complete(toy_app(), model=name), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_the_model_may_be_left_out_when_there_is_one():
    assert complete(toy_app(), model=None, max_tokens=1).json()["model"] == "toy"
    two = toy_app(served=[toy("a"), toy("b")])
    assert error_of(complete(two, model=None), 404)["param"] == "model"


def test_requests_go_to_the_model_named():
    engine = ScriptedEngine()
    complete(toy_app(engine, served=[toy("a"), toy("b")]), model="b", max_tokens=1)
    assert engine.models == ["b"]


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_prompts_around_the_context(length):
    for prompt in ([65] * length, "x" * (length - 1)):
        response = complete(toy_app(), prompt=prompt, max_tokens=1)
        if length < CONTEXT:
            assert response.status_code == 200
            continue
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert str(length) in error["message"] and str(CONTEXT) in error["message"]


def test_hopeless_texts_are_refused_before_tokenising():
    class Untouched:
        def encode(self, text, *, bos):
            raise AssertionError("tokenised")

    app = toy_app(served=[toy(tokenizer=Untouched())])
    for response in (
        complete(app, prompt="x" * (16 * CONTEXT + 1)),
        chat(app, messages=[{"role": "user", "content": "x" * (16 * CONTEXT + 1)}]),
    ):
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]


def test_max_tokens_beyond_the_room_left_is_refused_with_both_numbers():
    app = toy_app()
    assert complete(app, prompt=[65] * 12, max_tokens=CONTEXT - 12).status_code == 200
    for name in ("max_tokens", "max_completion_tokens"):
        error = error_of(complete(app, prompt=[65] * 12, **{name: CONTEXT - 11}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)
        assert str(CONTEXT + 1) in error["message"] and f" {CONTEXT};" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [""]}, "prompt", "no tokens"),
        ({"prompt": ["a", ""]}, "prompt[1]", "no tokens"),
        ({"max_tokens": 0}, "max_tokens", "0 is possible only with echo"),
        ({"min_tokens": 17}, "min_tokens", ""),  # beyond the default of max_tokens
    ],
)
def test_nothing_to_read_or_to_say_is_refused(body, param, words):
    error = error_of(complete(toy_app(), add_special_tokens=False, **body), 400)
    assert error["param"] == param and words in error["message"]
    assert complete(toy_app(), prompt="", max_tokens=1).status_code == 200  # the begin token


@pytest.mark.parametrize("bad", [VOCABULARY, VOCABULARY + 5, 2**31 - 1])
@pytest.mark.parametrize(
    ("field", "param", "value"),
    [
        ("prompt", "prompt", lambda token: [1, token]),
        ("prompt", "prompt[1]", lambda token: [[1], [token]]),
        ("stop_token_ids", "stop_token_ids", lambda token: [token]),
        ("logit_bias", "logit_bias", lambda token: {str(token): 1}),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(field, param, value, bad):
    error = error_of(complete(toy_app(), **{field: value(bad)}), 400)
    assert error["param"] == param and str(VOCABULARY - 1) in error["message"]


def post(app, path, **body):
    return ask(app, "POST", path, json=body)


def test_tokens_that_the_model_does_not_embed_are_refused_where_they_occur():
    """The tokenizer has 300 ids, of which the model embeds 190; "é" is 195 and 169."""
    app = toy_app(served=[toy(vocab_size=190)])
    plain = {"add_special_tokens": False, "max_tokens": 1}
    assert complete(app, prompt="abc", **plain).status_code == 200
    messages = [{"role": "user", "content": "é"}]
    for refused, param in (
        (complete(app, prompt="é", **plain), "prompt"),
        (complete(app, prompt=["a", "é"], **plain), "prompt[1]"),
        (complete(app, prompt="é", stream=True, **plain), "prompt"),
        (complete(app, prompt=[195], **plain), "prompt"),
    ):
        assert error_of(refused, 400)["param"] == param
    assert "195" in error_of(complete(app, prompt="é", **plain), 400)["message"]
    for send in (chat, partial(complete, prompt="a", add_special_tokens=False)):
        assert error_of(send(app, logit_bias={"195": 5}), 400)["param"] == "logit_bias"
        assert error_of(send(app, stop_token_ids=[195]), 400)["param"] == "stop_token_ids"
    assert error_of(chat(app, messages=messages), 400)["param"] == "messages"
    shown = post(app, "/tokenize", prompt="é", add_special_tokens=False).json()
    assert shown["tokens"] == [195, 169]
    assert post(app, "/detokenize", tokens=[195, 169]).json() == {"prompt": "é"}


def test_tokenize_and_detokenize():
    app = toy_app()
    assert post(app, "/tokenize", prompt="hé").json() == {
        "tokens": [BEGIN, 104, 195, 169],
        "count": 4,
        "max_model_len": CONTEXT,
        "token_strs": None,
    }
    shown = post(app, "/tokenize", text="h", return_token_strs=True).json()
    assert (shown["tokens"], shown["token_strs"]) == ([BEGIN, 104], ["<begin>", "h"])
    messages = [{"role": "user", "content": "a"}]
    talk = post(app, "/tokenize", messages=messages, model="toy").json()
    assert bytes(talk["tokens"]) == b"<user>a\n<assistant>"
    assert post(app, "/detokenize", tokens=[104, 195, 169], model="toy").json() == {"prompt": "hé"}
    assert post(app, "/tokenize", prompt="x" * CONTEXT * 2).json()["count"] == CONTEXT * 2 + 1
    assert error_of(post(app, "/tokenize"), 400)["param"] == "prompt"
    assert error_of(post(app, "/tokenize", prompt="a", text="b"), 400)["param"] == "text"
    assert error_of(post(app, "/detokenize", tokens=[VOCABULARY]), 400)["param"] == "tokens"


def test_refusals_of_the_engine_are_statuses_even_for_streams():
    for refusal, status in ((QueueFull("full"), 429), (ShuttingDown("bye"), 503)):
        engine = ScriptedEngine(refuse=refusal)
        for stream in (False, True):
            response = complete(toy_app(engine), stream=stream)
            assert error_of(response, status)["message"] == refusal.message
            assert 1 <= int(response.headers["retry-after"]) <= 30


@pytest.mark.parametrize("failure", [RequestFailed("broken"), ZeroDivisionError("secret")])
def test_a_request_that_fails_is_a_500_not_to_be_repeated(failure, caplog):
    app = toy_app(ScriptedEngine(failure_at=(1, failure)))
    response = complete(app)
    error = error_of(response, 500)
    assert error["type"] == "server_error" and "secret" not in error["message"]
    unexpected = isinstance(failure, ZeroDivisionError)
    said = f"request {response.headers['x-request-id']} failed unexpectedly"
    assert (said in caplog.text) is unexpected
    assert unexpected or response.headers["x-should-retry"] == "false"
    # The engine itself counts those that fail in it.
    assert rejected(app, "failed", "internal_error") == unexpected


@pytest.mark.parametrize("failure", [RequestFailed("broken"), ZeroDivisionError("secret")])
def test_a_stream_that_fails_ends_with_an_error_and_no_done(failure, caplog):
    engine = ScriptedEngine(failure_at=(3, failure))
    app = toy_app(engine)
    response = complete(app, stream=True, n=2)
    assert response.status_code == 200
    assert f"request {response.headers['x-request-id']} failed" in caplog.text
    last = response.text.rstrip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "[DONE]" not in response.text and "secret" not in response.text
    assert engine.live == 0
    assert sample(app.state.metrics, "stream_errors_total", **LABELS) == 1
    assert ("secret" in caplog.text) is isinstance(failure, ZeroDivisionError)


def test_the_error_of_a_route_that_is_not_there():
    app = toy_app()
    assert error_of(ask(app, "GET", "/v1/nothing"), 404)["code"] == "not_found"
    for path in ("/redoc", "/v1/docs", "//v1/models"):
        error_of(ask(app, "GET", path), 404)
    response = ask(app, "GET", "/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_head_is_get_without_a_body():
    app = toy_app()
    paths = [path for path, methods in app.openapi()["paths"].items() if "get" in methods]
    assert len(paths) >= 7
    for path in paths:
        path = path.replace("{name}", "toy")
        got, head = ask(app, "GET", path), ask(app, "HEAD", path)
        explains = path != "/v1/positions/audit"  # of the toy, nothing can be audited
        assert (head.status_code, head.content) == (200 if explains else 400, b""), path
        assert head.headers.keys() == got.headers.keys()
        if path != "/metrics":  # whose numbers have changed between the two
            assert int(head.headers["content-length"]) == len(got.content)
    missing = ask(app, "HEAD", "/v1/models/nothing")
    assert (missing.status_code, missing.content) == (404, b"")


def test_methods_that_are_allowed_are_named():
    app = toy_app()
    for method, path, allowed in (
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("HEAD", "/v1/completions", "POST"),
        ("PUT", "/tokenize", "POST"),
        ("PUT", "/v1/positions/audit", "GET, HEAD, POST"),
    ):
        response = ask(app, method, path, json={})
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


def test_a_slash_behind_a_path_changes_nothing():
    app = toy_app()
    for path in ("/v1/models", "/v1/models/toy", "/version", "/health/ready", "/v1/models/"):
        assert ask(app, "GET", path + "/").content == ask(app, "GET", path).content
    body = {"prompt": "a", "max_tokens": 1}
    assert ask(app, "POST", "/v1/completions/", json=body).json()["choices"][0]["text"] == "H"
    assert ask(app, "POST", "/tokenize/", json={"prompt": "a"}).json()["count"] == 2
    assert error_of(ask(app, "GET", "/v1/models/nothing/"), 404)["code"] == "model_not_found"
    assert error_of(ask(app, "GET", "/"), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/models/toy", "/v1/models/toy"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health/ready", "/health/ready"),
        ("/openai/deployments/toy/chat/completions", "/v1/chat/completions"),
        ("/v1/nothing", None),
        ("/", None),
        ("/v1", None),
        ("/" + "a/" * 1000 + "v1/models", None),
    ],
)
def test_who_asks_beside_the_path_is_told_the_one_that_was_meant(path, meant):
    for method in ("GET", "POST"):
        message = error_of(ask(toy_app(), method, path, json={}), 404)["message"]
        assert ("did you mean" in message) is (meant is not None)
        assert meant is None or f"'{meant}'" in message
        assert ("is for browsers" in message) is (path == "/")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": ""}, 415, "unsupported_media_type"),
        ({"content-type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        ({"content-encoding": "br"}, 415, "unsupported_encoding"),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200, None),
    ],
)
def test_only_plain_json_is_read(headers, status, code):
    headers = {"content-type": "application/json"} | headers
    content = b'{"prompt": "a", "max_tokens": 1}'
    response = ask(toy_app(), "POST", "/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    assert code is None or error_of(response, status)["code"] == code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),  # test_body.py knows more
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_key"),
        (b'{"prompt": "a", "zz": 1}', "unknown_parameter"),
    ],
)
def test_bad_bodies_are_400(content, code):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        headers = {"content-type": "application/json"}
        response = ask(toy_app(), "POST", path, content=content, headers=headers)
        error = error_of(response, 400)
        if code in ("invalid_json", "duplicate_key"):
            assert error["code"] == code
        assert error["type"] == "invalid_request_error"


def test_health_and_version():
    engine = ScriptedEngine()
    app = toy_app(engine)
    for path in ("/health", "/health/live", "/health/ready"):
        assert ask(app, "GET", path).status_code == 200
    assert ask(app, "GET", "/version").json()["version"]
    app.state.drain.begin(30)
    assert ask(app, "GET", "/health/live").status_code == 200
    for path in ("/health", "/health/ready"):
        assert error_of(ask(app, "GET", path), 503)["code"] == "shutting_down"
    engine.alive, engine.failure = False, "the device is lost"
    for path in ("/health", "/health/live", "/health/ready"):
        assert "the device is lost" in error_of(ask(app, "GET", path), 503)["message"]


def test_new_requests_are_refused_while_draining():
    app = toy_app()
    app.state.drain.begin(30)
    asked = [ask(app, "GET", path) for path in ("/v1/models", "/v1/models/", "/metrics/x")]
    for response in (complete(app), complete(app, stream=True), *asked):
        assert error_of(response, 503)["code"] == "shutting_down"
        assert response.headers["connection"] == "close"
        assert int(response.headers["retry-after"]) >= 1
    for path in ("/metrics", "/metrics/", "/health/live/"):
        assert ask(app, "GET", path).status_code == 200
    assert app.state.drain.in_flight == 0


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("Abc-1._", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("é", False)],
)
def test_request_ids(given, echoed):
    headers = {"x-request-id": given.encode()}
    shown = ask(toy_app(), "GET", "/health", headers=headers).headers["x-request-id"]
    assert (shown == given) is echoed
    assert 1 <= len(shown) <= 64


def test_own_ids_differ_even_when_the_client_repeats_its_own():
    engine = ScriptedEngine()
    app = toy_app(engine)
    one, two = (complete(app, {"x-request-id": "same"}, max_tokens=1).json() for _ in range(2))
    assert one["id"] != two["id"]
    assert engine.requests[0].id != engine.requests[1].id


def test_cache_salts():
    engine = ScriptedEngine()
    app = toy_app(engine)
    for salt in (None, "a", "b"):
        complete(app, cache_salt=salt, max_tokens=1)
    assert engine.requests[0].salt == ""
    assert len({request.salt for request in engine.requests}) == 3
