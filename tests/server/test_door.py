"""Refusals before a request's body is read."""

import asyncio
import json
import re
from dataclasses import replace
from functools import partial

import pytest

from ropewalk.server.errors import QueueFull, QueueTime
from ropewalk.server.http.door import SURE, Door
from ropewalk.server.scheduling.request import Outlook
from tests.server.toy import ScriptedEngine, ask, chat, complete, rejected, toy_app

SLOW = Outlook(seats=0, waiting=0, places=100, gap_s=1.0, apart_s=1.0, most_s=5 / SURE)


def door(outlook=SLOW, models=("m",)):
    return Door(models, lambda model: outlook, clock=lambda: 100.0)


def advice(door, error=QueueTime, model="") -> int:
    """When one more is told to come back, who is refused."""
    with pytest.raises(error) as refused:
        visit = door.enter("")
        visit.choose(model)
    return refused.value.retry_after


def test_who_would_wait_too_long_is_refused_and_told_when_to_come_back():
    d = door()
    visits = [d.enter("") for _ in range(5)]
    said = "6.0 s, longer than the limit of 8.33333 s (--max-queue-time)"
    with pytest.raises(QueueTime, match=re.escape(said)):
        d.enter("")
    first, second = advice(d), advice(d)
    assert 2 <= first < second <= 60
    visits[0].begin()
    visits[0].begin()
    d.enter("")
    with pytest.raises(QueueTime):
        d.enter("")


def test_free_places_and_an_unknown_pace_refuse_nobody():
    for outlook in (Outlook(seats=200, gap_s=1.0, most_s=5.0), Outlook(seats=0, most_s=0.1)):
        d = door(outlook)
        for _ in range(150):
            d.enter("")


def test_a_full_queue_is_refused_at_the_door():
    d = door(Outlook(seats=2, places=3))
    for _ in range(5):
        d.enter("")
    with pytest.raises(QueueFull, match="All 3 places"):
        d.enter("")
    with pytest.raises(QueueFull, match="All 3 places"):
        door(Outlook(seats=0, waiting=3, places=3)).enter("")


def test_appointments_are_forgotten_when_nobody_waits():
    """Else one client that asks again and again would cost all others a minute."""
    outlooks = {"m": SLOW}
    d = Door(["m"], outlooks.__getitem__, clock=lambda: 100.0)
    visits = [d.enter("") for _ in range(5)]
    assert [advice(d) for _ in range(100)][-1] == 60
    for visit in visits:
        visit.begin()
    outlooks["m"] = Outlook(seats=4, idle=True, places=100)
    d.enter("")
    outlooks["m"] = SLOW
    for _ in range(4):
        d.enter("")
    assert advice(d) < 5


def test_a_client_that_waits_for_much_does_not_keep_others_out():
    d = door()
    for _ in range(5):
        d.enter("greedy")
    with pytest.raises(QueueTime):
        d.enter("greedy")
    d.enter("modest")  # its turn comes after one of the other's
    d.enter("modest")
    with pytest.raises(QueueTime):
        d.enter("modest")  # five others, and these two


def test_with_several_models_the_body_decides():
    looks = {"slow": SLOW, "quick": Outlook()}
    d = Door(looks, looks.__getitem__)
    for _ in range(5):
        d.enter("").choose("slow")
    visit = d.enter("")
    with pytest.raises(QueueTime):
        visit.choose("slow")
    visit.choose("quick")
    visit.begin()
    looks["quick"] = Outlook(seats=0, waiting=9, places=9)
    with pytest.raises(QueueFull):
        d.enter("")


def test_requests_for_one_model_put_off_nobody_who_asks_for_another():
    looks = {"full": Outlook(seats=0, waiting=9, places=9, apart_s=0.5), "free": Outlook()}

    def advised(others):
        d = Door(looks, looks.__getitem__, clock=lambda: 100.0)
        for _ in range(others):
            d.enter("").choose("free")
        return advice(d, QueueFull, "full")

    assert advised(0) == advised(100) < 3


def test_where_all_models_are_full_one_gives_an_appointment():
    """The one that has room first."""
    full = Outlook(seats=0, waiting=9, places=9)
    looks = {"slow": replace(full, apart_s=20.0), "quick": replace(full, apart_s=1.0)}
    d = Door(looks, looks.__getitem__, clock=lambda: 100.0)
    advised = [advice(d, QueueFull) for _ in range(4)]
    looks["quick"] = Outlook()
    assert advised == sorted(advised) and advised[-1] < 10 < advice(d, QueueFull, "slow") < 40


def full_app(**more):
    engine = ScriptedEngine(ahead=Outlook(seats=0, waiting=3, places=3, **more))
    return toy_app(engine)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/completions/"])
def test_a_refused_body_is_not_read(path):
    app = full_app()
    received = []

    async def run():
        sent = []

        async def receive():
            received.append(1)
            return {"type": "http.request", "body": b"{", "more_body": True}

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"toy")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"headers": headers, "query_string": b"", "client": None, "state": {}}
        await app(scope, receive, send)
        return sent

    start, body = asyncio.run(run())
    assert received == []
    assert start["status"] == 429
    assert json.loads(body["body"])["error"]["code"] == "queue_full"
    assert int(dict(start["headers"])[b"retry-after"]) >= 1
    assert rejected(app, "queue_full", "queue_full") == 1


def test_other_paths_are_open_while_the_queue_is_full():
    app = full_app()
    assert complete(app).status_code == 429
    assert chat(app).status_code == 429
    assert ask(app, "POST", "/tokenize", json={"prompt": "a"}).status_code == 200
    assert ask(app, "GET", "/health").status_code == 200


def test_whoever_was_admitted_leaves_the_counters():
    engine = ScriptedEngine()
    app = toy_app(engine)
    engine.ahead = Outlook(seats=0, places=1)
    for _ in range(3):
        assert complete(app, max_tokens=2).status_code == 200
        assert complete(app, max_tokens=2, n=2).status_code == 200
        assert complete(app, temperature="warm").status_code == 400
        assert complete(app, max_tokens=2, stream=True).status_code == 200


def test_priority_and_client_reach_the_engine():
    engine = ScriptedEngine()
    app = toy_app(engine, api_keys=frozenset({"k"}))
    send = partial(complete, app, {"authorization": "Bearer k"}, max_tokens=1)
    assert send(prompt=["a", "b"], priority=-3).status_code == 200
    one, two = engine.requests
    assert one.priority == two.priority == -3
    assert one.client == two.client != ""
    assert one.group == two.group != ""
    engine.requests.clear()
    assert send(prompt="a").status_code == 200
    assert (engine.requests[0].priority, engine.requests[0].group) == (0, "")
