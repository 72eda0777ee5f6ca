"""What clients of other servers send and read, over HTTP: token ids, seeds, variables, markers."""

import pytest
import torch

from ropewalk.model.chat.template import ChatTemplate
from tests.model.tokenizers.samples import byte_level
from tests.server.fake_engine import VOCAB, engine_app, make_engine
from tests.server.toy import (
    BEGIN,
    CONTEXT,
    END,
    ScriptedEngine,
    ask,
    asking,
    chat,
    complete,
    error_of,
    events,
    toy,
    toy_app,
)

CONVERSATION = "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\nThe Nile, \u4e16."


def scores(choice: dict) -> tuple[str, list[str], list[int]]:
    return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]


# ------------------------------------------------------------------- markers in an echoed text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [0, 2])
def test_text_offsets_count_the_markers_of_an_echoed_text(stream, logprobs):
    tokenizer = byte_level()
    app = toy_app(served=[toy(tokenizer=tokenizer, stop_ids=frozenset({257}))])
    ids = tokenizer.encode(CONVERSATION, bos=False)
    for prompt in (CONVERSATION, ids):
        asked = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": 0}
        answer = complete(app, stream=stream, **asked)
        body = events(answer.text)[0] if stream else answer.json()
        text, tokens, offsets = scores(body["choices"][0])
        assert text == CONVERSATION == "".join(tokens)
        assert tokens[:3] == ["<|im_start|>", "u", "s"] and offsets[:3] == [0, 12, 13]
        assert tokens[-14] == "T" and offsets[-14] == CONVERSATION.index("The")
        for token, offset in zip(tokens, offsets, strict=True):
            assert text[offset : offset + len(token)] == token


def test_special_tokens_of_an_answer_are_told_apart():
    engine = ScriptedEngine(lambda request: [*b"a", BEGIN, *b"b", END])
    (choice,) = complete(toy_app(engine), logprobs=2).json()["choices"]
    assert scores(choice) == ("ab", ["a", "<begin>", "b", "<end>"], [0, 1, 1, 2])
    assert all(
        token in top
        for token, top in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
        )
    )
    (choice,) = chat(toy_app(engine), logprobs=True, top_logprobs=1).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == ["a", "<begin>", "b", "<end>"]
    assert [each["bytes"] for each in content] == [[97], None, [98], None]
    assert content[-1]["top_logprobs"][0] == {"token": "<end>", "logprob": -0.5, "bytes": None}


def test_characters_of_several_tokens_join_to_the_text():
    engine = ScriptedEngine(lambda request: list("x\u4e16\U0001f600".encode()[:-1]))
    (choice,) = complete(toy_app(engine), max_tokens=7, logprobs=1).json()["choices"]
    text, tokens, offsets = scores(choice)
    assert text == "x\u4e16\ufffd" == "".join(tokens)
    assert offsets == [0, 1, 1, 1, 2, 2, 2]


# ------------------------------------------------------------------------------- token ids


def test_completions_return_token_ids():
    app = toy_app(ScriptedEngine(lambda request: [*b"Hi", END]))
    asked = {"prompt": [[97], [98, 99]], "return_token_ids": True}
    first, second = complete(app, **asked).json()["choices"]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([97], [72, 105, END])
    assert (second["prompt_token_ids"], second["token_ids"]) == ([98, 99], [72, 105, END])
    chunks = [chunk["choices"][0] for chunk in events(complete(app, stream=True, **asked).text)]
    for index, prompt in enumerate(([97], [98, 99])):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert mine[0]["prompt_token_ids"] == prompt
        assert {str(chunk["prompt_token_ids"]) for chunk in mine[1:]} == {"None"}
        assert [token for chunk in mine for token in chunk["token_ids"]] == [72, 105, END]


def test_chats_return_token_ids():
    app = toy_app(ScriptedEngine(lambda request: [*b"Hi", END]))
    prompt = list(b"<user>abc\n<assistant>")
    whole = chat(app, return_token_ids=True).json()
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == [72, 105, END]
    first, *rest = events(chat(app, return_token_ids=True, stream=True).text)
    assert first["prompt_token_ids"] == prompt
    assert [token for chunk in rest for token in chunk["choices"][0]["token_ids"]] == [72, 105, END]
    assert not any("prompt_token_ids" in chunk for chunk in rest)


def test_token_ids_are_there_only_when_asked_for():
    app = toy_app()
    for body in (complete(app, max_tokens=1).json(), chat(app, max_tokens=1).json()):
        assert "token_ids" not in str(body)
    # A prompt that is only scored generates nothing.
    asked = {"echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    assert complete(app, **asked).json()["choices"][0]["token_ids"] == []


def test_tokens_are_shown_as_token_ids():
    app = toy_app()
    asked = {"prompt": "xé", "echo": True, "logprobs": 2, "max_tokens": 1}
    plain = complete(app, **asked).json()["choices"][0]["logprobs"]
    shown = complete(app, return_tokens_as_token_ids=True, **asked).json()["choices"][0]["logprobs"]
    assert shown["tokens"] == [f"token_id:{token}" for token in (BEGIN, 120, 195, 169, 72)]
    assert shown["top_logprobs"][-1] == {"token_id:72": -0.5, "token_id:73": -2.0}
    # Offsets stay those of the text.
    assert shown["text_offset"] == plain["text_offset"]
    (choice,) = chat(
        app, max_tokens=1, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True
    ).json()["choices"]
    (first,) = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == ("token_id:72", [72])
    assert [each["token"] for each in first["top_logprobs"]] == ["token_id:72", "token_id:73"]


# --------------------------------------------------------------------------- seeds and counts


def test_seed_minus_one_is_no_seed():
    def flat(batch, kv):
        return torch.zeros(len(batch.output_rows), VOCAB)

    real, _ = make_engine(flat)

    def answers(**fields) -> set[str]:
        asked = {"prompt": [1], "temperature": 1.5, "max_tokens": 16, "return_token_ids": True}
        found = [client.post("/v1/completions", json=asked | fields).json() for _ in range(6)]
        return {str(body["choices"][0]["token_ids"]) for body in found}

    with asking(engine_app(real)) as client:
        for none in (-1, -1.0, None):
            assert len(answers(seed=none)) == 6
        for seed in (0, -2, 2**32 - 1):
            assert len(answers(seed=seed)) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 4}, "n"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": ["a", "b"], "n": 2}, "prompt"),
    ],
)
def test_more_answers_than_could_ever_wait_are_refused_for_good(fields, param):
    app = toy_app(served=[toy(max_at_once=3)])
    error = error_of(complete(app, **fields), 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "asks for 4 answers" in error["message"] and "at most 3 at once" in error["message"]
    assert "--max-queue" in error["message"]
    assert error_of(chat(app, n=4), 400)["param"] == "n"
    assert complete(app, n=3, max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_as_many_tokens_as_fit(name):
    for send in (complete, chat):
        engine = ScriptedEngine()
        usage = send(toy_app(engine), **{name: -1, "overflow": "shift"}).json()["usage"]
        assert usage["total_tokens"] == CONTEXT
        assert engine.requests[0].params.max_tokens == CONTEXT - usage["prompt_tokens"]
    error = error_of(complete(toy_app(), max_tokens=-1, min_tokens=CONTEXT), 400)
    assert error["param"] == "min_tokens"


def test_the_most_likely_token_is_a_nucleus_of_nothing():
    engine = ScriptedEngine()
    for top_p in (0, 0.0, 0.5):
        complete(toy_app(engine), top_p=top_p, max_tokens=1)
    assert [request.params.greedy for request in engine.requests] == [True, True, False]
    assert [request.params.top_p for request in engine.requests] == [1.0, 1.0, 0.5]


# ------------------------------------------------------------------- variables of the template

READING = (
    "{{ enable_thinking }}|{{ reasoning_effort }}|{{ verbosity }}|{{ x }}|"
    "{% for m in messages %}{{ m.reasoning_content }}/{{ m.reasoning }}/{{ m.id }}/"
    "{{ m.content }};{% endfor %}"
)


def rendered(path: str = "/tokenize", template: str = READING, **fields) -> str:
    """The prompt that these fields make."""
    served = toy(chat_template=ChatTemplate(template, {}))
    messages = [{"role": "user", "content": "a", "id": "m1"}]
    answer = ask(toy_app(served=[served]), "POST", path, json={"messages": messages} | fields)
    return bytes(answer.json()["tokens"]).decode()


def test_templates_read_the_variables_that_are_sent():
    assert rendered() == "||||///a;"
    assert rendered(reasoning_effort="low", verbosity="high") == "|low|high||///a;"
    assert rendered(enable_thinking=False) == "False||||///a;"
    assert rendered(chat_template_kwargs={"x": [1, None], "y": 2}) == "|||[1, None]|///a;"


def test_a_template_that_reads_no_variable_is_not_changed_by_one():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    sent = {"chat_template_kwargs": {"x": 1}, "reasoning_effort": "high", "enable_thinking": True}
    assert rendered(template=plain, **sent) == rendered(template=plain) == "a"


def test_an_answer_comes_back_with_the_notes_of_litellm():
    notes = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}} | notes
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]} | notes,
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]
    body = {"model": "toy", "messages": messages, "max_tokens": 1}
    assert ask(toy_app(), "POST", "/v1/chat/completions", json=body).status_code == 200


def test_a_chat_hands_variables_and_reasoning_to_the_template():
    engine = ScriptedEngine()
    served = toy(chat_template=ChatTemplate(READING, {}))
    messages = [
        {"role": "assistant", "content": "b", "reasoning_content": "why", "reasoning": None},
        {"role": "assistant", "content": "c", "reasoning": "how"},
        {"role": "assistant", "content": None, "reasoning": "so"},
    ]
    answer = chat(
        toy_app(engine, [served]),
        messages=messages,
        chat_template_kwargs={"x": "y"},
        max_tokens=1,
        store=True,
        user="u" * 1000,
    )
    assert answer.status_code == 200
    assert bytes(engine.requests[0].tokens).decode() == "|||y|why/why//b;how/how//c;so/so//;"


def test_a_variable_cannot_replace_the_messages():
    """The template does not let it, whoever renders."""
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<s>"})
    taken = {"messages": [], "bos_token": "!"}
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages, add_generation_prompt=True, variables=taken) == "a<s>"


def test_a_variable_that_breaks_the_template_is_the_client_s_fault():
    template = "{{ x + 1 }}{{ messages[0].content }}"
    served = toy(chat_template=ChatTemplate(template, {}))
    error = error_of(chat(toy_app(served=[served]), chat_template_kwargs={"x": {}}), 400)
    assert error["code"] == "invalid_value"
