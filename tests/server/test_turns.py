"""Who is admitted next: between clients, between HTTP requests, by priority, and without delay."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.server.errors import QueueFull
from ropewalk.server.scheduling.queue import Turns
from ropewalk.server.scheduling.request import Request
from tests.server.fake_engine import make_request
from tests.server.scheduling import make_scheduler, names, shape, step


def request(name, prompt=3, **more):
    return make_request(name, [ord(name[0]), *range(prompt - 1)], **{"max_tokens": 4} | more)


def scheduler(*, seqs=8, waiting=5000, **more):
    chosen = {"context": 512, "prefix_sharing": False} | more
    return make_scheduler(4000, 4, seqs=seqs, waiting=waiting, **chosen)


def add(scheduler, name, prompt=3, **more):
    made = request(name, prompt, **more)
    scheduler.add(made)
    return made


def order(turns: Turns, barred=()) -> list[str]:
    """Everyone's names in the order of admission; each has cost as many tokens as its prompt."""
    admitted = []
    while (one := turns.next(barred)) is not None:
        turns.take(one)
        turns.charge(one.client, one.num_prompt)
        admitted.append(one.id)
    return admitted


def turns_of(*requests: Request, most=1) -> Turns:
    made = Turns(most)
    for one in requests:
        made.add(one)
    return made


def test_requests_of_one_prompt_keep_their_order():
    assert order(turns_of(*(request(name) for name in "dacb"))) == list("dacb")


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (1, "m0 a f0 b m1 f1 m2 m3 m4 m5 m6"),
        (3, "m0 m1 m2 a f0 f1 b m3 m4 m5 m6"),  # a turn may be several prompts of a list
    ],
)
def test_lists_of_prompts_take_turns_with_other_requests(most, found):
    many = [request(f"m{i}", group="many") for i in range(7)]
    few = [request(f"f{i}", group="few") for i in range(2)]
    turns = turns_of(*many, request("a"), *few, request("b"), most=most)
    assert order(turns) == found.split()


def test_who_comes_later_waits_for_one_prompt_of_each_before_it():
    turns = turns_of(*(request(f"m{i}", group="many") for i in range(1024)))
    for _ in range(10):
        turns.take(turns.next())
    turns.add(request("late"))
    assert order(turns)[:3] == ["m10", "late", "m11"]


def test_lower_priorities_come_earlier_within_a_client_only():
    turns = turns_of(
        request("a", priority=5, client="one"),
        request("b", priority=-1, client="one"),
        request("c", client="one"),
        request("x", client="two"),
        request("y", priority=9, client="two"),
    )
    found = order(turns)
    assert [name for name in found if name in "abc"] == ["b", "c", "a"]
    assert found.index("y") < found.index("a")  # two's worst is not behind one's


def test_clients_get_as_many_tokens_whatever_the_size_of_their_requests():
    turns = Turns()
    for i in range(400):
        turns.add(request(f"l{i}", 100, client="long"))
        turns.add(request(f"s{i}", 10, client="short"))
    used = Counter()
    for name in order(turns)[:110]:
        used[name[0]] += 100 if name[0] == "l" else 10
    assert abs(used["l"] - used["s"]) <= 100


def test_generated_tokens_count_too():
    turns = turns_of(
        *(request(f"{name}{i}", client=name) for i in range(3) for name in ("talker", "other"))
    )
    turns.take(first := turns.next())
    turns.charge(first.client, 500)
    assert [name[0] for name in order(turns)] == ["o", "o", "o", "t", "t"]


def test_nobody_pays_for_what_was_computed_while_no_other_waited():
    turns = Turns()
    turns.charge("old", 1_000_000)
    turns.add(request("o1", client="old"))
    turns.add(request("o2", client="old"))
    turns.add(request("n1", client="new"))
    turns.add(request("n2", client="new"))
    assert set(order(turns)[:2]) == {"o1", "n1"}


def test_nobody_saves_up_turns_by_sending_nothing():
    turns = turns_of(*(request(f"b{i}", client="busy") for i in range(50)))
    for _ in range(40):
        turns.take(one := turns.next())
        turns.charge(one.client, 1000)
    for i in range(5):
        turns.add(request(f"i{i}", 1000, client="idle"))
    assert sorted(name[0] for name in order(turns)[:4]) == ["b", "b", "i", "i"]


def test_the_barred_are_passed_over():
    turns = turns_of(request("m0", group="many"), request("m1", group="many"), request("a"))
    assert order(turns, {"many"}) == ["a"]
    assert order(turns) == ["m0", "m1"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_everyone_waits_for_a_bounded_number_of_others(data):
    """SC4: at the most for all that came before, and once for each of its client's requests."""
    turns, waiting, passed = Turns(), {}, Counter()
    for i in range(data.draw(st.integers(1, 60))):
        if data.draw(st.booleans()) or not waiting:
            group = data.draw(st.sampled_from(["", "g", "h"]))
            made = request(f"r{i}", data.draw(st.integers(1, 9)), group=group)
            waiting[made.id] = (made, len(waiting))
            turns.add(made)
            continue
        one = turns.next()
        turns.take(one)
        turns.charge(one.client, one.num_prompt)
        before = waiting.pop(one.id)[1]
        for other in waiting:
            passed[other] += 1
        if not one.group:
            assert passed[one.id] <= before
        assert {each.id for each in turns} == waiting.keys()
    assert sorted(order(turns)) == sorted(waiting)


def test_a_small_request_beside_a_thousand_prompts_runs_in_the_next_step():
    s = scheduler(seqs=16)
    for i in range(1024):
        add(s, f"m{i}", group="many", max_tokens=100)
    for _ in range(5):
        step(s)
    assert len(s.running) == 14  # the others are kept
    small = add(s, "small")
    plan, events = step(s)
    assert plan.admitted == (small,)
    assert "small" in {event.request_id for event in events}


@pytest.mark.parametrize("many", [{"group": "many"}, {"client": "many"}])
def test_beside_others_the_prompts_of_many_are_a_small_part_of_a_step(many):
    s = scheduler(seqs=16, tokens=64, several_clients="client" in many)

    def prompts(plan):
        """Tokens of the many's prompts in a step."""
        of_many = [work for work in plan.work if work.request.id != "small" and work.start < 20]
        return sum(work.count for work in of_many)

    for i in range(100):
        add(s, f"m{i}", 20, max_tokens=30, **many)
    # Alone they have all of it, or half where another client may come meanwhile.
    alone = 32 if "client" in many else 64
    assert prompts(step(s)[0]) == alone
    add(s, "small", 3, client="other", max_tokens=3)
    beside = [step(s)[0] for _ in range(3)]
    assert [prompts(plan) for plan in beside] == [8, 8, 8]
    assert all("small" in {work.request.id for work in plan.work} for plan in beside)
    assert prompts(step(s)[0]) > alone / 2


@pytest.mark.parametrize("many", [{"group": "many"}, {"client": "many"}])
def test_those_who_come_beside_others_have_small_steps_from_the_first_on(many):
    s = scheduler(seqs=16, tokens=64, several_clients="client" in many)
    add(s, "small", 3, client="other", max_tokens=9)
    step(s)
    for i in range(100):
        add(s, f"m{i}", 20, max_tokens=30, **many)
    for _ in range(3):
        assert sum(work.count for work in step(s)[0].work) == 1 + 8


def test_single_requests_share_steps_whatever_their_number():
    s = scheduler(seqs=16, tokens=64)
    for i in range(10):
        add(s, f"m{i}", 20)
    step(s)
    add(s, "small", 3)
    assert sum(work.count for work in step(s)[0].work) == 64


def test_a_short_prompt_does_not_wait_for_a_long_one_of_a_list():
    s = scheduler(seqs=16, tokens=64)
    for i in range(100):
        add(s, f"m{i}", 500, group="many")
    step(s)
    small = add(s, "small", 5)
    plan, events = step(s)
    assert shape(plan) == [("m0", 64, 8), ("small", 0, 5)]
    assert {event.request_id for event in events} == {"small"}
    for _ in range(3):  # it is decoded beside the long prompt
        _, events = step(s)
        assert "small" in {event.request_id for event in events}
    assert small.num_generated == 4


def test_a_short_prompt_does_not_wait_for_a_long_one_of_another_client():
    s = scheduler(seqs=16, tokens=64)
    add(s, "long", 500, client="one")
    step(s)
    add(s, "mine", 5, client="one")
    assert [work.request.id for work in step(s)[0].work] == ["long"]
    add(s, "other", 5, client="two")
    assert shape(step(s)[0])[1:] == [("other", 0, 5)]


def test_every_running_request_gets_a_token_in_every_step():
    s = scheduler(seqs=16, tokens=64)
    for name in "abcd":
        add(s, name, max_tokens=50)
    step(s)
    add(s, "long", 500)
    step(s)
    s._running.move_to_end("long", last=False)  # as if it had been admitted first
    for _ in range(5):
        plan, _ = step(s)
        assert [work.count for work in plan.work] == [60, 1, 1, 1, 1]


@pytest.mark.parametrize(("preempted", "running"), [(False, ["a1", "b"]), (True, ["a1"])])
def test_another_answer_that_waits_for_its_prompt_delays_others_once_it_ran(preempted, running):
    s = scheduler(seqs=16, tokens=64)
    add(s, "a1", 100, group="both")  # of which the second step leaves room
    second = add(s, "a2", 100, group="both", sibling="a1")
    step(s)
    if preempted:  # as if it had run, and had been preempted before its first token
        s._queue.turns.remove(second)
        second.admitted = 1.0
    add(s, "b", 2)
    step(s)
    assert names(s.running) == running


def test_several_clients_share_places_and_queue():
    s = scheduler(seqs=16, waiting=16, several_clients=True)
    for i in range(30):
        add(s, f"g{i}", client="greedy", max_tokens=300)
    with pytest.raises(QueueFull):
        add(s, "more", client="greedy")
    for _ in range(2):  # prompts of one client have half of a step
        step(s)
    assert len(s.running) == 14
    victim = add(s, "victim", client="other")
    assert step(s)[0].admitted == (victim,)


def test_with_one_client_all_places_are_used():
    s = scheduler(seqs=16)
    for i in range(30):
        add(s, f"g{i}", max_tokens=300)
    step(s)
    assert len(s.running) == 16


class Now:
    """A clock that stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_who_waits_too_long_is_told_so_and_others_go_on():
    clock = Now()
    s = scheduler(seqs=8, clock=clock, max_queue_s=2.0)
    for i in range(8):
        add(s, f"r{i}", max_tokens=300)
    step(s)
    add(s, "early")
    for i in range(10):  # of a list that has begun, the rest may take longer
        add(s, f"m{i}", group="many")
    clock.now = 1.5
    late = add(s, "late", arrival=1.5)
    assert s.end_late() == []
    clock.now = 2.5
    s.abort("r0")
    step(s)  # "early" has run
    assert "early" in names(s.running)
    s.abort("r1")
    step(s)  # and so has the first of the list
    clock.now = 4.5
    (event,) = s.end_late()
    assert event.request_id == late.id
    assert (event.error.status, event.error.code) == (429, "queue_time")
    assert "(--max-queue-time)" in event.error.message
    assert len(s.waiting) == 9
    assert s.outlook().waiting == 9
    s.check()


def test_the_outlook_comes_from_the_pace_of_real_ends():
    clock = Now()
    s = scheduler(seqs=2, clock=clock)
    assert s.outlook().wait(5) == 0
    for i in range(30):
        add(s, f"r{i}", max_tokens=1)
    assert s.outlook().gap_s is None
    for _ in range(12):
        clock.now += 1.0
        step(s)
    outlook = s.outlook()
    assert (outlook.seats, outlook.waiting) == (2, 6)
    assert 0.4 < outlook.gap_s < 0.6
    assert 3.5 < outlook.wait(9) < 4.5


@pytest.mark.parametrize("seed", range(12))
def test_all_finish_whoever_sends_what_under_pressure(seed):
    """SC1, SC3, SC4 with lists, several answers, clients, priorities, preemption and aborts."""
    pick = random.Random(seed)
    several = {"several_clients": seed % 2 == 0}
    s = make_scheduler(24, 4, seqs=8, tokens=16, waiting=500, **several)
    live, preempted, number = set(), 0, 0
    for _ in range(3000):
        if number < 150 and pick.random() < 0.5:
            group = pick.choice(["", "", f"list{number}"])
            client, priority = pick.choice("xyz"), pick.choice([0, 0, 1, -1])
            length, sibling = pick.randrange(1, 30), None
            for _ in range(pick.randrange(1, 9) if group else 1):
                more = {"client": client, "group": group, "priority": priority}
                more |= {"sibling": sibling, "max_tokens": pick.randrange(1, 20)}
                made = add(s, f"r{number}", length, **more)
                sibling = made.id if pick.random() < 0.5 else None
                live.add(made.id)
                number += 1
        if live and pick.random() < 0.03:
            gone = pick.choice(sorted(live))
            s.abort(gone)
            live.remove(gone)
        returning = [each.id for each in s.waiting if each.preemptions]
        plan, events = step(s)
        preempted += plan.preempted
        assert not plan.admitted or not (set(returning) & {each.id for each in s.waiting})
        live -= {event.request_id for event in events if event.finish}
        if number >= 150 and not live:
            break
    assert not live and not s.running and not s.waiting
    assert preempted > 5
    assert s._cache.counts().active == 0
