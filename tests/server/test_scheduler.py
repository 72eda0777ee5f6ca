import time
from dataclasses import replace

import pytest

from ropewalk.cache.types import InvariantError
from ropewalk.server.errors import InvalidField, PromptTooLong, QueueFull, RequestFailed
from ropewalk.server.scheduling.request import (
    FinishReason,
    Limits,
    Plan,
    Sampled,
    TokenLogprob,
)
from tests.server.scheduling import Clock, add, finish, make_scheduler, names, shape, step


def test_a_request_is_computed_then_decoded_token_by_token():
    s = make_scheduler()
    a = add(s, "a", [1, 2, 3], max_tokens=2)
    plan, events = step(s, 8)
    assert shape(plan) == [("a", 0, 3)]
    assert plan.admitted == (a,)
    assert [(e.request_id, e.token, e.finish) for e in events] == [("a", 8, None)]
    plan, events = step(s, 9)
    assert shape(plan) == [("a", 3, 1)]
    assert plan.admitted == ()
    assert [(e.token, e.finish) for e in events] == [(9, FinishReason.LENGTH)]
    assert a.tokens == [1, 2, 3, 8, 9]
    assert s.plan() == Plan((), 0, ())


def test_a_long_prompt_is_computed_in_chunks_and_samples_once():
    s = make_scheduler(tokens=4)
    add(s, "a", range(10), max_tokens=1)
    shapes, samples, tokens = [], [], []
    for _ in range(3):
        plan = s.plan()
        shapes += shape(plan)
        samples += [work.samples for work in plan.work]
        tokens += s.record(plan, {"a": Sampled(7)} if samples[-1] else {})
    assert shapes == [("a", 0, 4), ("a", 4, 4), ("a", 8, 2)]
    assert samples == [False, False, True]
    assert len(tokens) == 1


def test_a_request_may_take_more_tokens_while_there_is_no_other():
    s = make_scheduler(tokens=4, seqs=2, lone_factor=2)
    add(s, "a", range(30), max_tokens=1)
    assert shape(step(s)[0]) == [("a", 0, 8)]
    add(s, "b", [50], max_tokens=1)
    assert shape(step(s)[0]) == [("a", 8, 4)]
    s.abort("b")
    assert shape(step(s)[0]) == [("a", 12, 8)]


def test_the_budget_goes_to_the_oldest_first_and_running_before_waiting():
    s = make_scheduler(tokens=8, seqs=3)
    add(s, "a", range(5))
    add(s, "b", range(20, 27))
    add(s, "c", range(40, 42))
    assert shape(step(s)[0]) == [("a", 0, 5), ("b", 0, 3)]
    assert shape(step(s)[0]) == [("a", 5, 1), ("b", 3, 4), ("c", 0, 2)]
    add(s, "d", [50])
    assert names(s.running) == ["a", "b", "c"]
    assert shape(step(s)[0]) == [("a", 6, 1), ("b", 7, 1), ("c", 2, 1)]  # three places, no more
    assert names(s.waiting) == ["d"]


def test_admission_reserves_all_known_tokens_and_keeps_the_order():
    s = make_scheduler(blocks=6, size=4, seqs=4)
    add(s, "a", range(9), max_tokens=1)
    add(s, "b", range(20, 32), max_tokens=1)
    add(s, "c", [50], max_tokens=1)
    # a holds three of five blocks, b wants three, and c must not overtake it.
    assert shape(step(s)[0]) == [("a", 0, 9)]
    assert shape(step(s)[0]) == [("b", 0, 12), ("c", 0, 1)]


def test_room_is_sought_again_when_some_was_freed():
    s = make_scheduler(blocks=4, size=4)
    add(s, "a", range(8), max_tokens=4)
    add(s, "b", range(20, 28), max_tokens=1)
    assert shape(step(s)[0]) == [("a", 0, 8)]
    assert shape(step(s)[0]) == [("a", 8, 1)]
    s.abort("a")
    assert shape(step(s)[0]) == [("b", 0, 8)]


def test_room_is_sought_again_when_a_prompt_can_be_shared():
    s = make_scheduler(blocks=11, size=4)
    add(s, "a", range(28), max_tokens=8)
    add(s, "b", range(28), max_tokens=2)
    assert shape(step(s)[0]) == [("a", 0, 28)]  # three blocks are left and b wants seven
    assert shape(step(s)[0]) == [("a", 28, 1), ("b", 24, 4)]


def test_another_first_in_the_queue_is_tried_after_an_abort():
    s = make_scheduler(blocks=5, size=4)
    add(s, "a", range(8), max_tokens=4)
    add(s, "b", range(20, 32), max_tokens=1)
    add(s, "c", [50], max_tokens=1)
    assert shape(step(s)[0]) == [("a", 0, 8)]  # two blocks are left and b wants three
    s.abort("b")
    assert shape(step(s)[0]) == [("a", 8, 1), ("c", 0, 1)]


def test_running_requests_beyond_the_budget_wait_for_the_next_step():
    s = make_scheduler(tokens=2)
    add(s, "a", [1], max_tokens=2)
    add(s, "b", [2], max_tokens=4)
    step(s)
    s.limits = Limits(4, 1, 64, 100)
    assert shape(step(s)[0]) == [("a", 1, 1)]
    assert shape(step(s)[0]) == [("b", 1, 1)]


def test_the_newest_is_preempted_and_returns_before_any_that_never_ran():
    s = make_scheduler(blocks=5, size=2, seqs=3)
    a = add(s, "a", [1, 2], max_tokens=4)
    b = add(s, "b", [3, 4], max_tokens=4)
    step(s)
    step(s)
    add(s, "c", [5, 6], max_tokens=1)
    assert (a.computed, b.computed) == (3, 3)
    step(s)
    # Both have four stored tokens in two blocks each; a's fifth needs one of b's.
    plan, events = step(s)
    assert shape(plan) == [("a", 4, 1)]
    assert (plan.preempted, plan.admitted) == (1, ())
    assert [(e.request_id, e.finish) for e in events] == [("a", FinishReason.LENGTH)]
    assert (b.computed, b.preemptions) == (0, 1)
    assert names(s.waiting) == ["b", "c"]
    plan, _ = step(s)
    # Its own published blocks are still there, all but the one that a took.
    assert shape(plan) == [("b", 2, 3), ("c", 0, 2)]
    assert names(plan.admitted) == ["c"]
    assert b.tokens == [3, 4, 7, 7, 7, 7]
    assert b.cached == 0


def test_preemption_may_take_several_and_spares_the_oldest():
    s = make_scheduler(blocks=5, size=1, seqs=4)
    add(s, "a", [1], max_tokens=4)
    for name in "bcd":
        add(s, name, [ord(name)], max_tokens=2)
    step(s)
    plan, _ = step(s)
    assert shape(plan) == [("a", 1, 1), ("b", 1, 1)]
    assert plan.preempted == 2
    assert names(s.waiting) == ["c", "d"]


def test_a_step_that_preempts_admits_nobody():
    s = make_scheduler(blocks=7, size=1, seqs=2)
    add(s, "a", [1, 2, 3], max_tokens=2)
    add(s, "b", [1, 2, 3], max_tokens=2)
    step(s)
    # Both computed the same three blocks. a's fourth costs b its own, and it could share a's.
    plan, _ = step(s)
    assert (shape(plan), plan.preempted) == ([("a", 3, 1)], 1)
    assert shape(step(s)[0]) == [("b", 3, 1)]


def test_the_newest_preempts_itself_when_only_older_ones_run():
    s = make_scheduler(blocks=5, size=2, seqs=2)
    add(s, "a", [1, 2, 3, 4, 5], max_tokens=2)
    b = add(s, "b", [6, 7], max_tokens=3)
    step(s)
    # a has room for its sixth token; b's third would need a fifth block.
    plan, _ = step(s)
    assert (shape(plan), plan.preempted) == ([("a", 5, 1)], 1)
    assert b.preemptions == 1 and names(s.waiting) == ["b"]


def test_cached_tokens_are_counted_once_at_first_admission():
    s = make_scheduler(blocks=20, size=2)
    add(s, "a", [1, 2, 3, 4, 5], max_tokens=1)
    step(s)
    b = add(s, "b", [1, 2, 3, 4, 6], max_tokens=3)
    plan, events = step(s)
    assert shape(plan) == [("b", 4, 1)]
    assert (b.cached, events[0].cached_tokens) == (4, 4)
    assert s.computed_prompt_tokens == 5 + 1
    s._preempt_newest()
    plan, events = step(s)
    assert (plan.admitted, b.cached, events[0].cached_tokens) == ((), 4, 4)
    assert b.admitted == 103.0  # the fourth reading: two admissions, a's record
    assert s.drain_ended()[0].cached_tokens == 0


def test_prompt_logprobs_come_once_and_compute_the_whole_prompt():
    s = make_scheduler(size=2)
    add(s, "a", [1, 2, 3, 4, 5], max_tokens=1)
    step(s)
    b = add(s, "b", [1, 2, 3, 4, 5], max_tokens=2, prompt_logprobs=0)
    plan = s.plan()
    assert shape(plan) == [("b", 0, 5)]
    b.prompt_logprobs.append(TokenLogprob(2, -1.0))
    chosen = TokenLogprob(7, -0.5)
    (event,) = s.record(plan, {"b": Sampled(7, chosen)})
    assert event.prompt_logprobs == (None, TokenLogprob(2, -1.0))
    assert event.logprob is chosen
    _, (event,) = step(s)
    assert event.prompt_logprobs is None


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"max_tokens": 3}, [7, 7, 7], FinishReason.LENGTH),
        ({"max_tokens": 1}, [7], FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_ids": frozenset({7})}, [7], FinishReason.STOP),
        ({"max_tokens": 1, "stop_ids": frozenset({7})}, [7], FinishReason.STOP),
        ({"max_tokens": 9, "stop_ids": frozenset({8})}, [7] * 5, FinishReason.CONTEXT),
        ({"max_tokens": 5}, [7] * 5, FinishReason.LENGTH),
        ({"max_tokens": 9, "min_tokens": 3, "stop_ids": frozenset({7})}, [7] * 3, "stop"),
        ({"max_tokens": 2, "min_tokens": 3, "stop_ids": frozenset({7})}, [7] * 2, "length"),
    ],
)
def test_a_request_ends_for_one_reason_at_the_exact_token(params, tokens, reason):
    s = make_scheduler(context=8)
    a = add(s, "a", [1, 2, 3], **params)
    _, events = finish(s)
    assert a.tokens[3:] == [event.token for event in events] == tokens
    assert [event.finish for event in events] == [None] * (len(tokens) - 1) + [reason]
    (summary,) = s.drain_ended()
    assert (summary.finish, summary.prompt_tokens) == (reason, 3)
    assert summary.output_tokens == len(tokens)


def test_a_prompt_must_leave_room_for_one_token():
    s = make_scheduler(context=8)
    with pytest.raises(PromptTooLong) as refused:
        add(s, "secret-id", [41] * 8)
    assert refused.value.message.startswith("prompt has 8 tokens: the prompt is too long")
    assert (refused.value.param, refused.value.status) == ("prompt", 400)
    assert "41" not in refused.value.message and "secret" not in refused.value.message
    with pytest.raises(PromptTooLong):
        add(s, "b", [1] * 9)
    add(s, "c", [1] * 7)
    assert step(s)[1][0].finish is FinishReason.CONTEXT


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidField, match="no tokens"):
        add(make_scheduler(), "a", [])


def test_what_could_never_finish_is_refused_with_the_numbers():
    s = make_scheduler(blocks=4, size=4, context=64)  # room for 12 tokens
    with pytest.raises(InvalidField, match=r"4 tokens .* room for 13 .* holds 12") as refused:
        add(s, "a", [1] * 4, max_tokens=10)
    assert refused.value.param == "max_tokens"
    a = add(s, "a", [1] * 4, max_tokens=9)  # the ninth is never stored
    finish(s)
    assert a.num_generated == 9


def test_the_context_bounds_what_must_fit():
    s = make_scheduler(blocks=4, size=4, context=13)
    add(s, "a", [1] * 4, max_tokens=1000)
    finish(s)
    assert s.drain_ended()[0].finish is FinishReason.CONTEXT


def test_a_full_queue_refuses_and_keeps_what_it_has():
    s = make_scheduler(waiting=1, seqs=2)
    for name in "abc":  # of an idle engine's requests two need not wait
        add(s, name)
    with pytest.raises(QueueFull, match="All 1 places"):
        add(s, "d")
    assert names(s.waiting) == ["a", "b", "c"]
    step(s)
    assert names(s.waiting) == ["c"]
    with pytest.raises(QueueFull):
        add(s, "d")
    s.abort("c")
    add(s, "d")
    assert names(s.waiting) == ["d"]


def test_without_room_in_the_cache_a_free_seat_is_no_place_in_the_queue():
    s = make_scheduler(blocks=4, size=4, waiting=1, seqs=3)
    add(s, "a", [1] * 8, max_tokens=4)
    add(s, "b", [2] * 8, max_tokens=4)
    step(s)
    step(s)
    assert names(s.waiting) == ["b"]
    with pytest.raises(QueueFull):
        add(s, "c")


def test_an_id_in_use_is_refused():
    s = make_scheduler(seqs=1)
    add(s, "a")
    add(s, "b")
    step(s)
    for name in "ab":
        with pytest.raises(ValueError, match="in use"):
            add(s, name)
    assert (names(s.running), names(s.waiting)) == (["a"], ["b"])


def test_abort_frees_at_once_and_is_idempotent():
    s = make_scheduler(seqs=1)
    a, b = add(s, "a"), add(s, "b")
    step(s)
    assert s._cache.counts().active == 1
    assert s.abort("a") is a
    assert s._cache.counts().active == 0
    assert s.abort("b") is b
    assert [s.abort(name) for name in ("a", "b", "nobody")] == [None] * 3
    add(s, "done", max_tokens=1)
    step(s)
    assert s.abort("done") is None
    *ended, done = s.drain_ended()
    assert done.finish is FinishReason.LENGTH
    assert [each.finish for each in ended] == [FinishReason.ABORT] * 2
    assert [each.output_tokens for each in ended] == [1, 0]
    assert [each.admitted is None for each in ended] == [False, True]
    assert s.drain_ended() == []
    s.check()


def test_an_abort_leaves_shared_blocks_to_the_others():
    s = make_scheduler()
    a = add(s, "a", range(9))
    step(s)
    b = add(s, "b", range(9))
    step(s)
    assert b.cached == 8
    held = s._cache.table("b").blocks[:2]
    s.abort(a.id)
    assert [s._cache._pool.refs(block) for block in held] == [1, 1]
    s.check()


def test_a_request_aborted_during_its_step_is_skipped():
    s = make_scheduler()
    a, b = add(s, "a"), add(s, "b")
    plan = s.plan()
    s.abort("a")
    add(s, "a")
    events = s.record(plan, {"a": Sampled(7), "b": Sampled(8)})
    assert [(event.request_id, event.token) for event in events] == [("b", 8)]
    assert (a.num_generated, b.num_generated) == (0, 1)
    assert names(s.waiting) == ["a"]
    s.check()


def test_the_same_name_again_is_another_request():
    s = make_scheduler()
    add(s, "a", [1, 2, 3])
    stale = s.plan()
    s.abort("a")
    again = add(s, "a", [4, 5])
    s.plan()
    assert s.record(stale, {"a": Sampled(7)}) == []
    assert (again.tokens, again.computed) == ([4, 5], 0)
    s.check()


def test_a_failed_request_ends_alone_and_leaves_nothing_to_share():
    s = make_scheduler(size=2)
    add(s, "a", [1, 2, 3, 4, 5], max_tokens=3)
    b = add(s, "b", [9, 9, 9], max_tokens=3)
    step(s)
    error = RequestFailed("no finite logits")
    _, events = step(s, a=error)
    assert [(e.request_id, e.token, e.finish, e.error) for e in events] == [
        ("a", None, FinishReason.ERROR, error),
        ("b", 7, None, None),
    ]
    assert names(s.running) == ["b"] and b.num_generated == 2
    assert s.drain_ended()[0].finish is FinishReason.ERROR
    retry = add(s, "c", [1, 2, 3, 4, 5])
    step(s)
    assert retry.cached == 0  # although a had published two blocks before it failed


def test_a_request_can_fail_in_a_chunk_that_samples_nothing():
    s = make_scheduler(size=2, tokens=4)
    add(s, "a", [1, 2, 3, 4, 5, 6])
    error = RequestFailed("out of memory")
    events = s.record(s.plan(), {"a": Sampled(0, error=error)})
    assert [(e.token, e.finish, e.error) for e in events] == [(None, FinishReason.ERROR, error)]
    assert s._cache.counts().cached == 0 and not s.running
    assert s.computed_prompt_tokens == 0


def test_a_step_that_was_never_recorded_is_planned_again():
    s = make_scheduler(tokens=4)
    add(s, "a", range(6))
    add(s, "b", range(20, 23))
    first = s.plan()
    again = s.plan()
    assert shape(first) == shape(again) == [("a", 0, 4)]
    assert again.admitted == ()
    s.check()


def test_a_part_of_a_plan_can_be_recorded():
    s = make_scheduler()
    add(s, "a")
    add(s, "b")
    plan = s.plan()
    s.record(Plan(plan.work[1:], 0, ()), {"b": Sampled(7)})
    s.check()
    assert shape(s.plan()) == [("a", 0, 3), ("b", 3, 1)]


def record(s, plan, token=7):
    return s.record(plan, {work.request.id: Sampled(token) for work in plan.work})


def test_what_follows_is_foreseen_until_answers_end():
    s = make_scheduler(size=2)
    add(s, "a", range(3), max_tokens=3, stop_ids=frozenset([9]))
    add(s, "b", range(9), max_tokens=2)
    first = s.plan()
    second = s.foresee(first)
    assert shape(second) == [("a", 3, 1), ("b", 9, 1)]
    assert all(work.samples and work.decodes for work in second.work)
    assert not any(work.decodes for work in first.work)
    record(s, first)
    third = s.foresee(second)
    assert shape(third) == [("a", 4, 1)]  # b has its second token by then
    ends = [event.finish for event in record(s, second, token=9)]
    assert ends == [FinishReason.STOP, FinishReason.LENGTH]
    assert s.foresee(third) is None
    assert record(s, third) == []  # nobody's
    s.check()


def test_nothing_is_foreseen_where_the_host_takes_part():
    s = make_scheduler()
    add(s, "a")
    add(s, "b", prompt_logprobs=0)
    assert s.foresee(s.plan()) is None


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3, "top_p": 0.9},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
        {"logprobs": 2},
    ],
)
def test_what_a_device_picks_by_itself_is_foreseen(params):
    s = make_scheduler()
    add(s, "a", **params)
    assert shape(s.foresee(s.plan())) == [("a", 3, 1)]


def test_nothing_is_foreseen_of_some_requests_while_others_wait():
    s = make_scheduler(seqs=2, tokens=8)
    add(s, "a", range(4), max_tokens=9)
    add(s, "b", range(20, 26), max_tokens=9)
    first = s.plan()
    assert s.foresee(first) is None  # b's prompt is not whole
    s.record(first, {"a": Sampled(7)})
    second = s.plan()
    assert s.foresee(replace(second, work=second.work[:1])) is None
    add(s, "c")
    assert shape(s.foresee(second)) == [("a", 5, 1), ("b", 6, 1)]  # c finds no place
    record(s, second)
    s.abort("b")
    assert s.foresee(replace(second, work=second.work[:1])) is None  # c does


def test_whose_place_somebody_waits_for_is_not_left_empty():
    s = make_scheduler(seqs=2)
    add(s, "a", max_tokens=9)
    add(s, "b", max_tokens=1)
    plan = s.plan()
    assert shape(s.foresee(plan)) == [("a", 3, 1)]
    add(s, "c")
    assert s.foresee(plan) is None


def test_nothing_is_foreseen_without_room_or_past_the_context():
    s = make_scheduler(blocks=3, size=2, context=5)  # two blocks, and one that is reserved
    add(s, "a", range(2), max_tokens=3)
    first = s.plan()
    assert shape(s.foresee(first)) == [("a", 2, 1)]
    s = make_scheduler(blocks=4, size=2)
    add(s, "a", range(2), max_tokens=4)
    add(s, "b", range(10, 12), max_tokens=4)
    assert s.foresee(s.plan()) is None  # one block for two
    s.check()
    s = make_scheduler(context=5)
    add(s, "a", range(4), max_tokens=3)
    assert s.foresee(s.plan()) is None


def test_times_come_from_the_given_clock():
    s = make_scheduler()
    a = add(s, "a", max_tokens=2)
    step(s)
    assert (a.arrival, a.admitted, a.first_token) == (5.0, 101.0, 102.0)
    step(s)
    (summary,) = s.drain_ended()
    assert (summary.arrival, summary.admitted) == (5.0, 101.0)
    assert (summary.first_token, summary.end) == (102.0, 103.0)


def test_computed_prompt_tokens_are_counted_once_per_request():
    s = make_scheduler(tokens=4, prefix_sharing=False)
    add(s, "a", range(6), max_tokens=4)
    step(s)
    assert s.computed_prompt_tokens == 4
    s._preempt_newest()
    step(s)
    assert s.computed_prompt_tokens == 4
    step(s)
    step(s)
    s._preempt_newest()
    step(s)
    s._preempt_newest()
    finish(s)
    assert s.computed_prompt_tokens == 6


@pytest.mark.parametrize("name", ["max_seqs", "max_step_tokens", "max_context", "max_queue"])
def test_limits_below_one_are_refused(name):
    values = {"max_seqs": 1, "max_step_tokens": 1, "max_context": 1, "max_queue": 1}
    assert Limits(**values)
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Limits(**{**values, name: 0})


@pytest.mark.parametrize(
    "damage",
    [
        lambda s, a, b: s._queue.waiting.__setitem__("a", a),
        lambda s, a, b: s._running.__setitem__("b", b),
        lambda s, a, b: s._cache.release("a"),
        lambda s, a, b: s._cache.reserve("x", [1], 1),
        lambda s, a, b: setattr(a, "computed", len(a.tokens)),
        lambda s, a, b: setattr(b, "computed", 1),
        lambda s, a, b: a.tokens.extend(range(100)),
    ],
)
def test_check_sees_damage(damage):
    s = make_scheduler(seqs=1)
    a, b = add(s, "a"), add(s, "b")
    step(s)
    damage(s, a, b)
    with pytest.raises(InvariantError):
        s.check()


def test_check_sees_too_many_running():
    s = make_scheduler(seqs=1)
    step_limits = Limits(2, 64, 64, 100)
    s.limits, limits = step_limits, s.limits
    add(s, "a")
    add(s, "b")
    step(s)
    s.limits = limits
    with pytest.raises(InvariantError, match="too many"):
        s.check()


def test_ten_thousand_aborts_take_little_time():
    s = make_scheduler(waiting=20_000)
    for i in range(10_000):
        add(s, f"r{i}")
    s.plan()
    start = time.process_time()
    for i in reversed(range(10_000)):
        s.abort(f"r{i}")
    assert time.process_time() - start < 0.5  # linear: tens of milliseconds
    assert not s.waiting and not s.running
    assert len(s.drain_ended()) == 10_000


def test_planning_a_decode_step_of_32_requests_is_fast():
    s = make_scheduler(blocks=2000, size=16, seqs=32, tokens=8192, context=1024)
    for i in range(32):
        add(s, f"r{i}", [i, *range(127)], max_tokens=128)
    step(s)
    spent = []  # processor time: others on the machine do not count
    for _ in range(40):
        start = time.process_time()
        plan = s.plan()
        spent.append(time.process_time() - start)
        s.record(plan, {work.request.id: Sampled(7) for work in plan.work})
    assert all(work.count == 1 for work in plan.work) and len(plan.work) == 32
    assert min(spent) < 1e-3  # about 50 µs; generous, for slow and busy machines


def test_a_queue_without_room_is_not_matched_again_every_step():
    s = make_scheduler(blocks=10, size=4)
    add(s, "a", range(30), max_tokens=4)
    add(s, "b", range(50, 80), max_tokens=1)
    step(s)
    step(s)  # a's prompt is there to be shared, so b is tried once more
    lookups = []
    match = s._cache._index.match
    s._cache._index.match = lambda *args: lookups.append(args) or match(*args)
    for _ in range(2):
        step(s)
    assert not s.running
    assert lookups == []
    step(s)
    assert len(lookups) == 1 and names(s.running) == []


def test_a_full_queue_says_when_to_come_back():
    s = make_scheduler(seqs=1, waiting=1)
    for name in "ab":
        add(s, name, max_tokens=16, arrival=Clock.now)
    advice = []
    for name in "cde":
        with pytest.raises(QueueFull) as refused:
            add(s, name, [1])
        assert f"retry in {refused.value.retry_after} s" in refused.value.message
        advice.append(refused.value.retry_after)
    # Each gets a time of its own.
    assert 1 <= advice[0] < advice[1] < advice[2] <= 60


def test_a_step_computes_again_as_many_answered_tokens_as_requests():
    s = make_scheduler(seqs=3)
    add(s, "a", range(10), max_tokens=20)
    for _ in range(9):
        step(s)
    s._preempt_newest()
    works = [shape(step(s)[0]) for _ in range(4)]
    assert works == [[("a", 8, 5)], [("a", 13, 3)], [("a", 16, 3)], [("a", 19, 1)]]
