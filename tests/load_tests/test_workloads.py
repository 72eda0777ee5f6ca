import json

import pytest

from ropewalk.load_tests.common.types import Point, Profile
from ropewalk.load_tests.workload.prompts import PromptMaker
from ropewalk.load_tests.workload.workloads import (
    EXTRAPOLATION,
    TURNS,
    WORKLOADS,
    Sizes,
    workload_from,
)

SYNC = Profile("sync")
CLOSED = Profile("closed", concurrency=6)
OPEN = Profile("poisson", rate=2.0)
SIZES = Sizes(contexts=(224, 320), context=600, trained_context=400, arrivals=7)


def plan(name, profile=SYNC, *, sizes=SIZES, prompts=None, point=0, form="ids"):
    prompts = prompts or PromptMaker("s", form)
    workload = WORKLOADS[name]
    return workload.plan(workload.points(sizes)[point], profile, prompts, sizes)


def lengths(made):
    return [(request.prompt_tokens, request.output_tokens) for request in made]


@pytest.mark.parametrize("profile", [SYNC, CLOSED, OPEN], ids=lambda each: each.label)
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_plan_follows_from_the_seed_and_repeats_nothing(name, profile):
    prompts = PromptMaker("s", "ids")
    for point in range(len(WORKLOADS[name].points(SIZES))):
        first, second = (
            plan(name, profile, prompts=prompts, point=point),
            plan(name, profile, prompts=prompts, point=point),
        )
        everything = [request.prompt for made in (first, second) for request in made]
        assert len(set(everything)) == len(everything)
        beginnings = [{request.prompt[:16] for request in made} for made in (first, second)]
        assert not beginnings[0] & beginnings[1]
        for request in first:
            assert len(request.prompt) == request.prompt_tokens
    again = PromptMaker("s", "ids")
    assert plan(name, profile, prompts=again) == plan(name, profile)
    assert plan(name, profile) != plan(name, profile, prompts=PromptMaker("other", "ids"))


def test_the_number_of_requests_follows_the_profile():
    assert lengths(plan("stream")) == [(128, 128)] * 4
    assert lengths(plan("stream", CLOSED)) == [(128, 128)] * 24
    assert lengths(plan("stream", OPEN)) == [(128, 128)] * 7
    assert lengths(plan("prefill")) == [(1024, 1)] * 4


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_with_the_context_that_a_workload_names_can_take_all_of_it(name):
    sizes = Sizes(context=600, trained_context=200)
    context = WORKLOADS[name].context(sizes)
    points = range(len(WORKLOADS[name].points(sizes)))
    needed = [
        request.prompt_tokens + (1 if request.extra else request.output_tokens)
        for point in points
        for request in plan(name, CLOSED, sizes=sizes, point=point)
    ]
    assert max(needed) <= context
    assert name in ("chat", "shift") or max(needed) == context


@pytest.mark.parametrize("name", ["longctx", "extrapolate"])
def test_workers_of_long_contexts_go_on_after_their_first_wave(name):
    assert len(plan(name)) == 1
    assert len(plan(name, CLOSED)) == 24
    assert len(plan(name, OPEN)) == 7


def test_longctx_has_prompts_at_every_length():
    assert WORKLOADS["longctx"].points(SIZES) == [
        Point("longctx", "longctx 224", 224),
        Point("longctx", "longctx 320", 320),
    ]
    assert [point.context for point in WORKLOADS["longctx"].points(Sizes())] == [512, 2048, 8192]
    assert lengths(plan("longctx", CLOSED, point=1)) == [(128, 192)] * 24
    with pytest.raises(ValueError, match="longctx 192 leaves no prompt"):
        plan("longctx", sizes=Sizes(contexts=(192,)))


def test_a_turn_extends_the_turn_before_it_which_was_sent_at_least_a_round_earlier():
    requests = plan("chat", CLOSED, sizes=Sizes(context=8192, requests_per_worker=1))
    conversations = len(requests) // TURNS
    assert conversations == 6
    for earlier, later in zip(requests, requests[conversations:], strict=False):
        assert later.prompt[: len(earlier.prompt)] == earlier.prompt
        assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens


def test_chat_varies_and_stays_within_the_context():
    made = plan("chat", Profile("closed", concurrency=60), sizes=Sizes(context=600))
    first_turns = lengths(made)[: len(made) // TURNS]
    prompts, outputs = (sorted(column) for column in zip(*first_turns, strict=True))
    assert 90 < prompts[len(prompts) // 2] < 180
    assert 90 < outputs[len(outputs) // 2] < 180
    assert prompts[-1] > 3 * prompts[0]
    assert max(prompt + output for prompt, output in lengths(made)) <= 600
    assert all(prompt % 4 == output % 4 == 0 for prompt, output in lengths(made))


def test_a_conversation_that_fills_the_context_begins_anew():
    requests = plan("chat", CLOSED, sizes=Sizes(context=256))
    conversations = len(requests) // TURNS
    anew = [
        later.prompt[:16] != earlier.prompt[:16]
        for earlier, later in zip(requests, requests[conversations:], strict=False)
    ]
    assert any(anew)
    assert not all(anew)
    assert all(request.prompt_tokens + request.output_tokens <= 256 for request in requests)


def test_text_turns_extend_each_other_too():
    requests = plan("chat", form="text")
    assert requests[2].prompt.startswith(requests[0].prompt + " ")
    assert len(requests[2].prompt.split(" ")) == requests[2].prompt_tokens


def test_the_shared_prefixes_are_shared_within_a_run():
    requests = plan("shared-prefix")
    assert len(requests) == 32
    assert len({request.prompt[:768] for request in requests[:8]}) == 8
    assert [request.prompt[:768] for request in requests[:8]] * 4 == [
        request.prompt[:768] for request in requests
    ]


def test_shift_fills_the_context_and_goes_on():
    for request in plan("shift"):
        assert request.prompt_tokens < 600 < request.prompt_tokens + request.output_tokens
        assert request.extra == {"overflow": "shift"}
    with pytest.raises(ValueError, match="32 tokens is too short"):
        plan("shift", sizes=Sizes(context=32))


def test_extrapolate_ends_at_multiples_of_the_trained_context():
    for index, times in enumerate(EXTRAPOLATION):
        (made,) = lengths(plan("extrapolate", point=index))
        assert sum(made) == times * 400
    assert [point.context for point in WORKLOADS["extrapolate"].points(SIZES)] == [400, 800, 1600]


def test_a_fifth_of_the_clients_leave_before_the_end():
    requests = plan("cancel", Profile("closed", concurrency=25))
    leaving = [request.leaves_after for request in requests if request.leaves_after is not None]
    assert len(leaving) == 20
    assert min(leaving) >= 1
    assert max(leaving) < 128
    assert len(set(leaving)) > 10


def test_names_and_what_is_none():
    assert workload_from("chat") is WORKLOADS["chat"]
    assert all(workload.name == name for name, workload in WORKLOADS.items())
    with pytest.raises(ValueError, match="no workload 'chatt'; use chat, stream"):
        workload_from("chatt")


def from_file(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return workload_from(f"file:{path}")


def test_a_file_says_what_is_sent(tmp_path):
    lines = [{"prompt": "Ropes and 歩"}, {"prompt": [5, 6, 7], "max_tokens": 9}]
    workload = from_file(tmp_path, json.dumps(lines[0]), "", json.dumps(lines[1]))
    (point,) = workload.points(SIZES)
    assert (workload.name, point.label) == ("file:prompts.jsonl",) * 2
    made = workload.plan(point, SYNC, PromptMaker("s", "ids"), SIZES)
    assert [(each.prompt, each.prompt_tokens, each.output_tokens) for each in made] == [
        ("Ropes and 歩", None, 128),
        ((5, 6, 7), 3, 9),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[1, 2]", 'no "prompt"'),
        ('{"max_tokens": 3}', 'no "prompt"'),
        ('{"prompt": "a", "temperature": 1}', "'temperature' is not known"),
        ('{"prompt": ""}', "neither a text nor a list of token ids, or it is empty"),
        ('{"prompt": []}', "or it is empty"),
        ('{"prompt": [1, -1]}', "neither a text nor a list"),
        ('{"prompt": [1, true]}', "neither a text nor a list"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0; use a whole number from 1 up"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens is '9'"),
    ],
)
def test_a_fault_names_its_line(line, fault, tmp_path):
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 3: ") as refused:
        from_file(tmp_path, '{"prompt": "a"}', "", line)
    assert fault in str(refused.value)


def test_a_file_without_prompts(tmp_path):
    with pytest.raises(ValueError, match="has no prompts"):
        from_file(tmp_path, "", " ")
    with pytest.raises(OSError):
        workload_from("file:/nowhere/prompts.jsonl")
