"""When clients that find the queue full are told to come back, and whether that is enough."""

import heapq
import itertools

from ropewalk.server.errors import MAX_RETRY_AFTER
from ropewalk.server.scheduling.queue import Appointments, Pace
from ropewalk.server.scheduling.request import Request
from tests.products import pairs
from tests.server.fake_engine import make_request

TRIES = 3  # the openai package's: one, and two more


def request(max_tokens: int, generated: int = 0) -> Request:
    made = make_request("a", [0], max_tokens=max_tokens)
    made.tokens += [0] * generated
    return made


def answered(clients, *, seats, queue, max_tokens, tokens, per_token, before=0, usual=None):
    """How many clients, who come at once and heed the advice, are answered.

    Each answer has `tokens` tokens of `per_token` seconds. Before them, `before` answers of
    `usual` tokens had ended.
    """
    pace, appointments, clock = Pace(), Appointments(seats + queue), 0.0
    for _ in range(before):
        pace.begin(clock)
        clock += (usual or tokens) * per_token
        pace.end(clock, usual or tokens)
    order = itertools.count()
    events = [(clock + 0.01 * each, next(order), "try", 1) for each in range(clients)]
    waiting, running, done = [], [], 0
    while events:
        now, _, what, tried = heapq.heappop(events)
        if what == "end":
            running.remove(tried)
            pace.end(now, tokens)
            done += 1
        elif len(waiting) + len(running) < seats + queue:
            if not (waiting or running):
                pace.begin(now)
            waiting.append(now)
        elif tried < TRIES:
            generated = [int((now - began) / per_token) for began in running]
            ahead = [request(max_tokens, made) for made in generated] or [request(max_tokens)]
            after = appointments.give(now, pace.gap(now, ahead))
            heapq.heappush(events, (now + after, next(order), "try", tried + 1))
        while waiting and len(running) < seats:
            running.append(now)
            waiting.pop(0)
            heapq.heappush(events, (now + tokens * per_token, next(order), "end", now))
    return done


@pairs(
    lengths=[(16, 16), (64, 64), (200, 200), (8000, 8), (8000, 100)],  # asked for, and come
    per_token=[0.003, 0.03, 0.08],
    before=[0, 8],
)
def test_five_clients_are_answered_one_by_one(lengths, per_token, before):
    shape = dict(zip(("max_tokens", "tokens"), lengths, strict=True))
    assert answered(5, seats=1, queue=1, per_token=per_token, before=before, **shape) == 5


def test_longer_answers_than_before_are_waited_for():
    shape = {"seats": 1, "queue": 1, "max_tokens": 300, "tokens": 300, "per_token": 0.03}
    assert answered(5, before=8, usual=16, **shape) == 5


def test_a_larger_server_answers_more_clients():
    shape = {"max_tokens": 64, "tokens": 64, "per_token": 0.02}
    assert answered(24, seats=4, queue=4, **shape) == 24


def test_advice_is_in_whole_seconds_up_to_a_minute():
    pace, appointments = Pace(), Appointments(2)
    pace.begin(0.0)
    gap = pace.gap(0.5, [request(64)])
    advice = [appointments.give(0.5, gap) for _ in range(100)]
    assert all(type(each) is int for each in advice)
    assert advice == sorted(advice)
    assert (min(advice) >= 1, max(advice)) == (True, MAX_RETRY_AFTER)


def test_a_fast_server_says_a_second():
    pace, appointments = Pace(), Appointments(1000)
    pace.begin(0.0)
    for end in range(1, 40):
        pace.end(end / 100, 16)
    gap = pace.gap(0.4, [request(16)])
    assert [appointments.give(0.4, gap) for _ in range(20)] == [1] * 20


def test_pauses_do_not_count():
    paces = []
    for pause in (0.0, 1000.0):
        pace, appointments, now = Pace(), Appointments(2), 0.0
        for _ in range(40):
            pace.begin(now)
            now += 1.0
            pace.end(now, 16)
            now += pause
        pace.begin(now)
        paces.append(appointments.give(now, pace.gap(now, [request(16)])))
    assert paces[0] == paces[1] <= 3
