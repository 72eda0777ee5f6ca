"""Requests that go on when their context is full: shift and slide, and forks of one prompt."""

import pytest

from ropewalk.cache.types import Capability
from ropewalk.server.errors import InvalidField, UnsupportedField
from ropewalk.server.scheduling.request import FinishReason, Limits, Overflow
from tests.model.running import run_uncached
from tests.model.tiny import tiny
from tests.products import combined
from tests.server.recording import Recording, request
from tests.server.scheduling import add, finish, make_scheduler, step

CONTEXT, BLOCK = 24, 4


def scheduler_of(blocks=20, *, context=CONTEXT, **more):
    made = make_scheduler(blocks, BLOCK, seqs=8, context=context, **more)
    return made, made._cache


def going_on(scheduler, name="r", prompt=5, **more):
    """Far past the context, with its blocks shifted unless `more` says otherwise."""
    chosen = {"max_tokens": 200, "overflow": Overflow.SHIFT} | more
    return add(scheduler, name, range(prompt), **chosen)


def test_what_a_shift_frees_is_for_those_who_wait():
    scheduler, _ = scheduler_of(blocks=8)  # of which one holds nothing
    going_on(scheduler, prompt=20)
    step(scheduler)
    waiting = add(scheduler, "w", range(9), max_tokens=2, salt="shares nothing")
    shifted = False
    while not shifted:
        assert waiting in scheduler.waiting
        plan, _ = step(scheduler)
        shifted = bool(plan.shifts)
    assert waiting in scheduler.running


@pytest.mark.parametrize(
    ("overflow", "dropped"), [(Overflow.SHIFT, 8), (Overflow.SLIDE, 4)], ids=str
)
def test_what_is_dropped(overflow, dropped):
    """Six blocks: the first stays, of the four full ones after it half go, or the oldest."""
    scheduler, manager = scheduler_of()
    going = going_on(scheduler, overflow=overflow)
    shifts = [shift for plan in finish(scheduler)[0] for shift in plan.shifts]
    assert {shift.dropped for shift in shifts} == {dropped}
    assert all(shift.kept + shift.dropped == CONTEXT for shift in shifts)
    assert going.num_generated == 200
    assert len(shifts) == (200 + 5 - 1 - CONTEXT) // dropped + 1
    assert manager.counts().active == 0


def test_memory_stays_what_the_context_takes():
    scheduler, manager = scheduler_of(blocks=7)
    going_on(scheduler)
    most = 0
    while scheduler.running or scheduler.waiting:
        step(scheduler)
        most = max(most, manager.counts().active)
    assert most == CONTEXT // BLOCK


def test_without_overflow_the_answer_ends_at_the_context():
    scheduler, _ = scheduler_of()
    ending = going_on(scheduler, overflow=Overflow.REFUSE)
    _, events = finish(scheduler)
    assert events[-1].finish is FinishReason.CONTEXT
    assert len(ending.tokens) == CONTEXT


def test_a_preempted_request_is_computed_again_without_what_was_dropped():
    scheduler, _ = scheduler_of()
    going = going_on(scheduler, prompt=9)
    while not going.dropped:
        step(scheduler)
    dropped, computed = going.dropped, scheduler.computed_prompt_tokens
    scheduler._preempt_newest()
    generated = going.num_generated
    while going.num_generated == generated:  # some tokens of the answer in each step
        plan, _ = step(scheduler)
    work = plan.work[0]
    assert (work.start + work.count, going.dropped) == (going.context_length - 1, dropped)
    assert scheduler.computed_prompt_tokens == computed == 9
    finish(scheduler)
    assert going.num_generated == 200


def test_a_full_request_that_is_preempted_drops_before_it_is_computed():
    scheduler, _ = scheduler_of()
    going = going_on(scheduler)
    while going.context_length < CONTEXT:
        step(scheduler)
    scheduler._preempt_newest()
    plan, _ = step(scheduler)
    (shift,) = plan.shifts
    assert (shift.dropped, shift.report) == (8, None)
    assert going.dropped == 8


@pytest.mark.parametrize(
    ("capability", "overflow", "more", "reason"),
    [
        (Capability.IMPOSSIBLE, Overflow.SHIFT, {}, "its positions are in its values"),
        (Capability.IMPOSSIBLE, Overflow.SLIDE, {}, "its positions are in its values"),
        (Capability.REWRITE, Overflow.SLIDE, {}, "--encoding-option storage=block"),
        (Capability.APPROXIMATE, Overflow.SLIDE, {}, "--encoding-option storage=block"),
        (Capability.FREE, Overflow.SHIFT, {"prompt_logprobs": 0}, "echo"),
    ],
)
def test_what_an_encoding_cannot_do_is_refused_at_once(capability, overflow, more, reason):
    scheduler, _ = scheduler_of(capability=capability)
    with pytest.raises(UnsupportedField, match=reason) as refused:
        going_on(scheduler, overflow=overflow, **more)
    assert refused.value.param == "overflow"
    going_on(scheduler, overflow=Overflow.REFUSE, **more)


def test_a_context_of_two_blocks_has_nothing_to_drop():
    scheduler, _ = scheduler_of(context=2 * BLOCK + 3)
    with pytest.raises(InvalidField, match="at least 3 blocks"):
        going_on(scheduler)


# ------------------------------------------------------------------------------------- forks


def twins(scheduler, *, prompt=10, count=3, max_tokens=4):
    more = {"max_tokens": max_tokens}
    siblings = [None] + ["t0"] * (count - 1)
    return [
        add(scheduler, f"t{n}", range(prompt), sibling=sibling, **more)
        for n, sibling in enumerate(siblings)
    ]


def test_choices_of_one_prompt_compute_it_once():
    scheduler, manager = scheduler_of()
    twins(scheduler)
    first, _ = step(scheduler)
    assert [(work.request.id, work.start, work.count) for work in first.work] == [("t0", 0, 10)]
    second, _ = step(scheduler)
    assert [(work.start, work.count) for work in second.work] == [(10, 1), (9, 1), (9, 1)]
    assert manager.counts().active == 2 + 3
    assert scheduler.computed_prompt_tokens == 12
    finish(scheduler)
    assert manager.counts().active == 0


def test_a_preempted_choice_finds_its_prompt():
    """What it had generated, others may have computed as a prompt since, which rounds otherwise."""
    scheduler, manager = scheduler_of()
    twins(scheduler, count=2, max_tokens=20)
    for _ in range(12):
        step(scheduler)
    held = manager.counts().active
    preempted = scheduler._preempt_newest()
    plan, _ = step(scheduler)
    (again,) = [work for work in plan.work if work.request is preempted]
    assert again.start == 10 // BLOCK * BLOCK
    assert manager.counts().active <= held + 1  # with one for its next token


def test_a_choice_whose_sibling_left_computes_by_itself():
    scheduler, _ = scheduler_of()
    first, second, _ = twins(scheduler)
    scheduler.abort(first.id)
    plan, _ = step(scheduler)
    assert [(work.request.id, work.start) for work in plan.work] == [("t1", 0), ("t2", 0)]
    assert second.num_generated == 1


def test_a_fork_without_room_waits():
    scheduler, manager = scheduler_of(blocks=5)
    made = twins(scheduler, count=2)
    finish(scheduler)
    assert [each.num_generated for each in made] == [4, 4]
    manager.check()


# ----------------------------------------------------------------- with real decoders and tensors


ROPES = ["rope", "rope-scaled"]
FREE = ["nope", "t5", "alibi", "rope-raw", "rope-block"]
CASES = [
    *((name, Overflow.SHIFT) for name in ROPES),
    *combined(
        FREE,
        [Overflow.SHIFT, Overflow.SLIDE],
        always=lambda name, how: (how is Overflow.SLIDE) == (name in ("t5", "rope-block")),
    ),
]


@pytest.mark.parametrize(("encoding", "overflow"), CASES)
def test_five_contexts_of_one_layer_equal_recomputation(encoding, overflow):
    """In one layer keys and values depend on nothing but token and position, so dropping tokens
    leaves no context error: every row of logits equals one pass over what is kept."""
    context = 4 * BLOCK
    options = {"layers": [0]} if encoding == "rope-scaled" else {}
    decoder = tiny(encoding, num_layers=1, windows=(None,), options=options)
    recording = Recording(decoder, blocks=12, limits=Limits(4, 16, context, 10))
    going = request("r", range(7), max_tokens=5 * context, overflow=overflow)
    recording.engine.submit(going)
    worst, shifts = 0.0, 0
    while recording.engine.busy:
        before = going.dropped
        recording.step()
        shifts += going.dropped > before
        _, first, logits = recording.rows[-1]
        expected = run_uncached(decoder, going.context(0, first + len(logits)))[first:]
        worst = max(worst, float((logits - expected).abs().max()))
        assert recording.manager.counts().active <= context // BLOCK
    assert going.num_generated == 5 * context
    assert shifts >= 8
    # Angles are float32, and a key that was turned on differs by their rounding.
    assert worst <= (1e-5 if encoding in ROPES else 1e-10)
