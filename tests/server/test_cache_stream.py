"""GET /v1/cache/stream: whoever applies the changes has what /v1/cache says."""

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from signal import SIGTERM
from socket import SHUT_RDWR
from threading import Thread

import httpx
import pytest

from ropewalk.server.app import watching
from ropewalk.server.app.cache import described
from ropewalk.server.app.watching import Look, Watch
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.errors import InternalError
from ropewalk.server.http.streaming import Drain
from ropewalk.server.scheduling.request import Overflow
from tests.server.fake_engine import make_engine, make_planner, make_request, slowly
from tests.server.toy import ask, asking, running, toy, toy_app, wait_for

LETTERS = {"f": "free", "c": "cached", "h": "active", "s": "active", "q": "quarantined"}


class Mirror:
    """A client: what a page would keep of the stream."""

    def __init__(self):
        self.pool, self.entry, self.kinds, self.seen = "", None, [], ""

    def take(self, event):
        self.kinds.append(event.get("type"))
        if "error" in event:
            self.error = event["error"]
            return
        if event["type"] == "snapshot":
            self.pool, self.entry = event["pool"], event["entry"]
            return
        for first, letters in event.get("pool", ()):
            self.pool = self.pool[:first] + letters + self.pool[first + len(letters) :]
        for name in ("blocks", "audit", "spill", "waiting", "shared"):
            self.entry[name] = event.get(name, self.entry[name])
        lists = {"request": "requests", "kept": "kept"}
        known = {kind: {each["id"]: each for each in self.entry[lists[kind]]} for kind in lists}
        for name, change in event.get("sequences", {}).items():
            if change is None:
                (kind,) = [kind for kind in lists if name in known[kind]]
                del known[kind][name]
            else:
                known[change.pop("kind")].setdefault(name, {}).update(change)
        for kind, of in known.items():
            order = event.get("order", {}).get(kind, of)
            self.entry[lists[kind]] = [of[name] for name in order]

    def assert_is(self, entry):
        assert self.entry == entry
        held = {}
        for sequence in entry["requests"] + entry["kept"]:
            for block in sequence["blocks"]:
                held[block] = "s" if block in held else "h"
        assert {i: letter for i, letter in enumerate(self.pool) if letter in "hs"} == held
        counted = dict.fromkeys(LETTERS.values(), 0)
        for letter in self.pool[1:]:
            counted[LETTERS[letter]] += 1
        assert (self.pool[0], counted) == ("-", entry["blocks"])


def app_of(engine):
    return toy_app(engine, planners={"a": make_planner()})


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Seen(AsyncEngine):
    """Counts how often it is looked at."""

    looks = 0

    async def ask(self, model, question, *, changes=False):
        self.looks += 1
        return await super().ask(model, question, changes=changes)


@contextmanager
def listening(url):
    """A mirror that a thread keeps as it should be."""
    mirror = Mirror()
    with (
        httpx.Client(base_url=url, timeout=20) as client,
        client.stream("GET", "/v1/cache/stream") as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")

        def listen():
            with suppress(httpx.HTTPError, httpx.StreamError):
                for line in response.iter_lines():
                    mirror.seen += line
                    if line.startswith("data: "):
                        mirror.take(json.loads(line[6:]))

        thread = Thread(target=listen, daemon=True)
        thread.start()
        wait_for(lambda: mirror.entry)
        yield mirror
        # Closing alone does not end a read in another thread.
        with suppress(OSError):  # the server has closed it
            response.extensions["network_stream"].get_extra_info("socket").shutdown(SHUT_RDWR)
        thread.join(10)


# All that happens to a cache: prefixes that are found, forks, preemption, contexts that are
# shortened, requests that leave, flushes.
def test_a_mirror_has_what_the_cache_has_after_every_step() -> None:
    engine, _ = make_engine(blocks=20, max_context=32, max_seqs=6)
    draw, planner, served = random.Random(5), make_planner(), toy("a")
    mirror, look, seen, kinds, names = Mirror(), None, set(), set(), []
    happened: Counter[str] = Counter()

    def entry(view):
        return described(served, planner, view)

    for step in range(250):
        if draw.random() < 0.6 and engine.view().waiting < 6:
            overflow, kind = draw.choice(list(Overflow)), draw.choice([5, 7])
            prompt = [n % kind for n in range(draw.choice([3, 17]))]
            most = 6 if overflow is Overflow.REFUSE else draw.choice([1, 8, 60])
            fits = most == 6 and len(prompt) == 3  # into the quarter that is for kept ones
            more = {
                "overflow": overflow,
                "sibling": names[-1] if names and draw.random() < 0.5 else None,
                "keep": f"seq-{step}" if fits else "",
            }
            names.append(f"r{step}")
            engine.submit(make_request(names[-1], prompt, max_tokens=most, **more))
        kept = engine.kept.views("")
        if kept and draw.random() < 0.1:
            engine.kept.drop(draw.choice(kept).kept.id, "")
        if names and draw.random() < 0.05:
            engine.abort(draw.choice(names[-6:]))
        if draw.random() < 0.03:
            engine.flush()
        for _ in range(draw.choice([1, 1, 1, 12])):
            stats = engine.step().stats
            happened += Counter(
                preempted=stats.preemptions, shifted=len(stats.shifts), forked=len(stats.forks)
            )
        view = engine.view()
        if step % 7 == 0:  # the older ones have come back between two looks
            turned = (each[1:] + each[:1] for each in (view.running, view.kept))
            view = replace(view, **dict(zip(("running", "kept"), turned, strict=True)))
        before, look = look, Look(view, entry, look)
        event = look.delta if before and look.number > before.number else None
        if before is None:
            event = look.snapshot
        if event is not None:
            data = json.loads(event.removeprefix(b"data: "))
            mirror.take(data)
            seen |= data.keys()
        kinds |= {kind for kind in ("requests", "kept") if mirror.entry[kind]}
        mirror.assert_is(json.loads(json.dumps(entry(look.view))))
    assert kinds == {"requests", "kept"}
    assert min(happened[what] for what in ("preempted", "shifted", "forked")) > 5
    assert {"pool", "blocks", "audit", "waiting", "sequences", "shared", "order"} <= seen


def test_a_page_follows_a_server_that_computes() -> None:
    """Over HTTP, without a word of the prompt, and looked at no more when it is closed."""
    engine = Seen({"a": make_engine(slowly)[0]}, lambda *_: None)
    words = "not to be told"
    with asking(app_of(engine)) as client:

        def complete():
            body = {"prompt": words, "max_tokens": 40, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

        complete()
        assert engine.looks == 0
        with listening(client.base_url) as one, listening(client.base_url) as other:
            complete()
            entry = client.get("/v1/cache").json()["data"][0]
            for mirror in (one, other):
                wait_for(lambda mirror=mirror: mirror.entry == entry)
                mirror.assert_is(entry)
                assert mirror.kinds[0] == "snapshot" and len(mirror.kinds) > 3
                assert words not in mirror.seen
                assert str(list(words.encode()))[1:-1].replace(" ", "") not in mirror.seen
        seen = [engine.looks]
        while len(seen) < 5 or seen[-5] < seen[-1]:  # for a while, no look
            assert len(seen) < 100
            time.sleep(0.1)
            seen.append(engine.looks)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_stream_that_is_not_one(method, monkeypatch) -> None:
    """HEAD ends at once, and one more than may listen is told so."""
    monkeypatch.setattr(watching, "MOST_LISTENERS", 0)
    engine = Seen({"a": make_engine()[0]}, lambda *_: None)
    answer = ask(app_of(engine), method, "/v1/cache/stream")
    assert (answer.status_code, engine.looks) == (429 if method == "GET" else 200, 0)
    answer = ask(app_of(engine), method, "/v1/cache/stream?model=b")
    assert answer.status_code == 404


def test_a_server_that_ends_waits_for_no_page() -> None:
    engine = Seen({"a": make_engine()[0]}, lambda *_: None)
    with running(app_of(engine), drain_seconds=60) as (url, server), listening(url) as mirror:
        server.handle_exit(SIGTERM, None)
        wait_for(lambda: mirror.kinds[-1] is None)
        assert mirror.error["code"] == "shutting_down"


@pytest.mark.anyio
async def test_one_look_is_for_all_and_whoever_missed_a_change_gets_everything(monkeypatch) -> None:
    monkeypatch.setattr(watching, "LEAST_PAUSE_S", 0.0)
    engine, _ = make_engine()
    engine.submit(make_request("x", range(9), max_tokens=80))
    looks = 0

    async def look():
        nonlocal looks
        looks += 1
        engine.step()
        return replace(engine.view(), seconds=0.0)

    watch = Watch(look, lambda view: described(toy("a"), make_planner(), view), Drain())
    quick, other, slow = Mirror(), Mirror(), Mirror()

    async def listen(mirror, pauses):
        async for event in watch.events():
            mirror.take(json.loads(event.removeprefix(b"data: ")))
            await asyncio.sleep(pauses)
            if looks > 40:
                return

    await asyncio.gather(listen(quick, 0), listen(other, 0), listen(slow, 0.15))
    watch.close()
    assert quick.kinds.count("snapshot") == other.kinds.count("snapshot") == 1
    assert quick.kinds.count("delta") > 10
    assert slow.kinds.count("snapshot") > 1
    assert looks < 60  # and not three times as many


@pytest.mark.anyio
async def test_a_failure_ends_every_stream(caplog) -> None:
    async def look():
        raise RuntimeError("no such block")

    watch = Watch(look, lambda view: {}, Drain())
    with pytest.raises(InternalError):
        await anext(watch.events())
    assert "no such block" in caplog.text
