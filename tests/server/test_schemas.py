"""Bodies: what is refused, which field is named, and how long saying no takes."""

import time

import pytest

from ropewalk.server.errors import InvalidField, MissingField, UnknownField, UnsupportedField
from ropewalk.server.openai.body import HARMLESS, UNSUPPORTED, read_body
from ropewalk.server.openai.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    CachePlanBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

HUGE = 10**30


def completion(**fields):
    return read_body(CompletionBody, {"prompt": "a"} | fields)


def chat(**fields):
    return read_body(ChatBody, {"messages": [{"role": "user", "content": "a"}]} | fields)


def refusal(read, kind=InvalidField, **fields):
    """What is raised for these fields."""
    with pytest.raises(kind) as refused:
        read(**fields)
    return refused.value


@pytest.mark.parametrize(
    "prompt",
    ["a", "", ["a", "b"], [1, 2], [[1], [2, 3]], [0], ["a"] * 1024],
    ids=lambda each: repr(each)[:24],
)
def test_prompt_forms(prompt):
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        (5, "prompt"),
        (True, "prompt"),
        ({"a": 1}, "prompt"),
        ([True], "prompt"),
        ([1.0], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([HUGE], "prompt[0]"),
        (["a"] * 1025, "prompt"),
        ([[1]] * 1025, "prompt"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_refused_prompts(prompt, param):
    assert refusal(completion, prompt=prompt).param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", [1] * 30_000 + ["x"]),
        ("prompt", [{}] * 30_000),
        ("prompt", [[1] * 10_000] * 3 + [{}]),
        ("logit_bias", {str(token): "x" for token in range(30_000)}),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_large_wrong_value_is_refused_fast_and_briefly(name, value):
    start = time.perf_counter()
    with pytest.raises(InvalidField) as refused:
        completion(**{name: value})
    assert time.perf_counter() - start < 0.1
    assert refused.value.param.split("[")[0] == name
    assert len(refused.value.message) < 200


IN_RANGE = [
    ("temperature", 0, 2),
    ("temperature", 0.0, 2.0),
    ("top_p", 0, 1),
    ("top_k", -1, 0),
    ("top_k", 1, 2**31 - 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 2),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", -(2**63), 2**63 - 1),
    ("n", 1, 16),
    ("logprobs", 0, 5),
    ("max_tokens", 1, 2**31 - 1),
    ("max_completion_tokens", -1, 1),
    ("min_tokens", 0, 5),
    ("stop", "x", ["a", "b", "c", "d"]),
    ("stop", [], "y" * 256),
    ("stop_token_ids", [], [0, 5]),
    ("logit_bias", {}, {"0": -100, "17": 100.0}),
    ("cache_salt", "a", "A.b_c-9" * 18),
]


@pytest.mark.parametrize(("name", "low", "high"), IN_RANGE)
def test_the_ends_of_every_range_are_inside(name, low, high):
    for value in (low, high):
        got = getattr(completion(**{name: value}), name)
        if name == "stop" and isinstance(value, str):
            value = [value]
        if name == "logit_bias":
            value = {int(key): bias for key, bias in value.items()}
        assert got == value


OUT_OF_RANGE = [
    *(("temperature", bad) for bad in (-0.1, 2.1, "1", True, float("nan"), float("inf"), HUGE)),
    *(("top_p", bad) for bad in (-0.1, 1.01, "1")),
    *(("top_k", bad) for bad in (-2, 1.5, "5", True, 2**31)),
    *(("min_p", bad) for bad in (-0.1, 1.1)),
    *(("repetition_penalty", bad) for bad in (0, -1, 2.1)),
    *(("presence_penalty", bad) for bad in (-2.1, 2.1)),
    *(("frequency_penalty", bad) for bad in (-2.1, 1e300)),
    *(("seed", bad) for bad in (2**63, -(2**63) - 1, 1.5, "1", True)),
    *(("n", bad) for bad in (0, -1, 17, 10**9, 1.5, 17.0, 1e300, "2", True)),
    *(("logprobs", bad) for bad in (-1, 21, 10**9, True, 1.5)),
    *(("max_tokens", bad) for bad in (0, -2, 2**31, 1.5, float("inf"), "16", True)),
    *(("max_completion_tokens", bad) for bad in (0, 0.0, -2, 1.5)),
    *(("min_tokens", bad) for bad in (-1, 0.5, True)),
    *(("stop", bad) for bad in (["a"] * 17, [1], 1, "x" * 257, {"a": 1})),
    *(("stop_token_ids", bad) for bad in ([-1], [2**31], [True], ["1"], 1, [1] * 129)),
    ("logit_bias", []),
    *(
        ("logit_bias", {key: 1})
        for key in ("1.0", " 1", "1e3", "+1", "01", "-1", "", "x", "٣", "1\n")
    ),
    *(("logit_bias", {"1": bad}) for bad in (101, -101, "1", None, True, float("nan"))),
    *(("cache_salt", bad) for bad in ("", "a b", "a\n", "é", "x" * 129, 5)),
    *(("echo", bad) for bad in (1, "true")),
    *(("priority", bad) for bad in (1.5, "1", True, 2**63, [1])),
    *(("stream", bad) for bad in (1, "true")),
    ("model", 5),
    ("ignore_eos", "yes"),
    # What changes no answer must be well-formed all the same.
    ("user", 5),
    *(("metadata", bad) for bad in ({"a": 1}, [])),
    ("store", "yes"),
    ("reasoning_effort", 3),
    ("chat_template_kwargs", "x"),
    ("enable_thinking", "no"),
]


@pytest.mark.parametrize(("name", "bad"), OUT_OF_RANGE, ids=lambda value: repr(value)[:24])
def test_out_of_range_names_the_field(name, bad):
    refused = refusal(completion, **{name: bad})
    assert refused.param.split("[")[0] == name
    assert refused.code == "invalid_value"


def test_null_means_not_given():
    names = set(CompletionBody.model_fields) - {"prompt"} | set(UNSUPPORTED) | set(HARMLESS)
    body = completion(**dict.fromkeys(names | {"best_of"}))
    assert body == completion()


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("suffix", ""),
        ("use_beam_search", False),
        ("skip_special_tokens", True),
        ("no_stop_trim", False),
        ("return_hidden_states", False),
        ("separate_reasoning", True),
        ("stream_reasoning", True),
        ("best_of", 1),
        ("best_of", 1.0),
        ("stop", ""),
        ("stop", [""]),
        ("seed", -1),
        ("seed", -1.0),
        ("length_penalty", 1.0),
        ("modalities", ["text"]),
        ("user", "u" * 100_000),
        ("safety_identifier", ""),
        ("prompt_cache_key", "k" * 1000),
        ("metadata", {str(index): "v" * 512 for index in range(20)}),
        ("store", False),
        ("store", True),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("enable_thinking", True),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("service_tier", "auto"),
        ("parallel_tool_calls", True),
    ],
)
def test_neutral_values_of_unsupported_fields_are_accepted(name, neutral):
    assert completion(**{name: neutral}) == completion()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("grammar", "x"),
        ("chat_template", "{{ x }}"),
        ("lora_request", "x"),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("skip_special_tokens", False),
        ("return_hidden_states", True),
        ("separate_reasoning", False),
        ("best_of", 2),
        ("best_of", True),
        ("length_penalty", 2.0),
    ],
)
def test_unsupported_fields_are_refused_when_they_would_matter(name, value):
    refused = refusal(completion, UnsupportedField, **{name: value})
    assert refused.param == name
    assert refused.code == "unsupported_parameter"


def test_best_of_may_equal_n():
    assert completion(best_of=3, n=3).n == 3


@pytest.mark.parametrize("name", ["frobnicate", "Prompt", "prompt ", "top_logprobs", "messages"])
def test_unknown_fields_are_refused_by_name(name):
    """Unless they are null, as clients write what is new in an API and not given."""
    completion(**{name: None})
    refused = refusal(completion, UnknownField, **{name: 1})
    assert refused.param == name
    assert name in refused.message


def test_an_unknown_name_is_shown_escaped_and_short():
    refused = refusal(completion, UnknownField, **{"\x1b[31m\r\n" + "x" * 10_000: 1})
    assert refused.message.isprintable()
    assert len(refused.message) < 200


def test_missing_prompt_and_messages():
    for schema, name in ((CompletionBody, "prompt"), (ChatBody, "messages")):
        with pytest.raises(MissingField) as refused:
            read_body(schema, {"model": "a"})
        assert refused.value.param == name


def test_fields_that_contradict_each_other():
    for param, fields in (
        ("max_completion_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
        ("min_tokens", {"max_tokens": 1, "min_tokens": 2}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("prompt", {"prompt": ["a"] * 513, "n": 2}),
    ):
        assert refusal(completion, **fields).param == param
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert completion(max_tokens=2, max_completion_tokens=2, min_tokens=2).wanted_tokens == 2
    assert completion(max_completion_tokens=3).wanted_tokens == 3
    assert len(completion(prompt=["a"] * 64, n=2).prompt) == 64


def test_stream_options():
    options = completion(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None}
    ).stream_options
    assert options.include_usage and not options.continuous_usage_stats
    with pytest.raises(UnknownField, match=r"stream_options\.x"):
        completion(stream=True, stream_options={"x": 1})
    with pytest.raises(UnsupportedField):
        completion(stream=True, stream_options={"include_obfuscation": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 16),
        ("max_tokens", -1),
        ("max_completion_tokens", 3),
        ("min_tokens", 0),
        ("top_k", -1),
        ("top_k", 40),
        ("seed", 2**40),
        ("n", 2),
        ("logprobs", 0),
    ],
)
def test_integers_may_be_written_as_floats(name, value):
    got = getattr(completion(**{name: float(value)}), name)
    assert got == value and type(got) is int


def test_integers_of_chats_and_plans_may_be_written_as_floats():
    assert chat(logprobs=True, top_logprobs=2.0, max_tokens=16.0).wanted_logprobs == 2
    plan = read_body(CachePlanBody, {"operation": "truncate", "tokens": 8.0, "count": 2.0})
    assert (plan.tokens, plan.count) == (8, 2)


def test_empty_stop_strings_are_left_out():
    assert completion(stop=["", "a", ""]).stop == ["a"]
    assert completion(stop="").stop == []


def test_as_many_tokens_as_fit_can_be_asked_for_with_a_least_number():
    assert completion(max_tokens=-1, min_tokens=9).wanted_tokens == -1
    assert chat(max_completion_tokens=-1).wanted_tokens == -1
    for ask in (completion, chat):
        with pytest.raises(InvalidField) as refused:
            ask(max_tokens=0)
        assert refused.value.param == "max_tokens"


def test_variables_of_the_chat_template():
    body = chat(
        chat_template_kwargs={"enable_thinking": False, "x": [None]},
        reasoning_effort="high",
        verbosity="low",
    )
    assert body.variables == {
        "enable_thinking": False,
        "x": [None],
        "reasoning_effort": "high",
        "verbosity": "low",
    }
    assert chat().variables == {}
    assert chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": True}).variables


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "pad_token"]
)
def test_variables_that_the_server_sets_are_refused(name):
    with pytest.raises(InvalidField, match=f"{name}, which is the server's") as refused:
        chat(chat_template_kwargs={name: None})
    assert refused.value.param == "chat_template_kwargs"


def test_a_variable_given_twice_must_be_the_same():
    with pytest.raises(InvalidField, match="differ") as refused:
        chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert refused.value.param == "reasoning_effort"


def test_many_variables_are_not_gathered_once_for_each(monkeypatch):
    dumped, dump = [], ChatBody.model_dump
    monkeypatch.setattr(
        ChatBody, "model_dump", lambda body, **how: dumped.append(how) or dump(body, **how)
    )
    chat(chat_template_kwargs={f"x{place}": place for place in range(100)})
    assert len(dumped) == 1


def test_logprobs_of_chat():
    assert chat().wanted_logprobs is None
    assert chat(logprobs=True).wanted_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).wanted_logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).wanted_logprobs is None
    for bad in ({"logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(InvalidField):
            chat(**bad)


def test_messages():
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "tool_calls": [], "refusal": None},
            {"role": "user", "content": "d", "name": "eve"},
            {
                "role": "user",
                "id": "msg_1",
                "cache_control": {"type": "ephemeral"},
                "content": [
                    {"type": "text", "text": "e", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "f", "cache_control": None},
                ],
            },
            {"role": "assistant", "content": "g", "reasoning_content": "why", "reasoning": ""},
            {"role": "assistant", "content": None, "refusal": "no"},
        ]
    )
    assert [message.plain() for message in body.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "eve"},
        {"role": "user", "content": "ef"},
        {"role": "assistant", "content": "g", "reasoning_content": "why", "reasoning": "why"},
        {"role": "assistant", "content": "no"},
    ]


USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "a"}
PICTURE = {"type": "image_url", "image_url": {}}
PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], ""),
        ("hi", ""),
        ([USER] * (MAX_MESSAGES + 1), ""),
        ([5], "[0]"),
        ([{"role": "user"}], "[0].content"),
        ([SAID | {"content": None}], "[0].content"),
        ([{"content": "a"}], "[0].role"),
        ([USER | {"role": "function"}], "[0].role"),
        ([USER | {"role": "tool"}], "[0].tool_call_id"),
        ([USER | {"tool_call_id": "b"}], "[0].tool_call_id"),
        ([USER | {"content": 5}], "[0].content"),
        ([USER | {"content": []}], "[0].content"),
        ([USER | {"content": [PART] * (MAX_PARTS + 1)}], "[0].content"),
        ([USER | {"content": [PICTURE]}], "[0].content[0].type"),
        ([USER | {"content": [PART | {"cache_control": 1}]}], "[0].content[0].cache_control"),
        ([USER, USER | {"zz": 1}], "[1].zz"),
        ([SAID | {"reasoning_content": 5}], "[0].reasoning_content"),
        ([USER | {"id": 5}], "[0].id"),
        ([SAID | {"tool_calls": [{}]}], "[0].tool_calls[0].function"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_refused_messages(messages, param):
    assert refusal(chat, messages=messages).param == f"messages{param}"


def test_tokens_bodies():
    assert read_body(TokenizeBody, {"prompt": "a"}).prompt == "a"
    assert read_body(DetokenizeBody, {"tokens": [1, 2]}).tokens == [1, 2]
    for bad in ({"tokens": [-1]}, {"tokens": "a"}, {"tokens": [True]}, {}):
        with pytest.raises(InvalidField):
            read_body(DetokenizeBody, bad)
