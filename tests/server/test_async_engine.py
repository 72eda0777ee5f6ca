"""The asyncio side of the engine thread: every caller gets its events, or learns why not."""

import asyncio
import threading
import time
from contextlib import aclosing
from functools import partial

import pytest

from ropewalk.server.engine import async_engine
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.engine.engine import Engine
from ropewalk.server.errors import ModelNotLoaded, PromptTooLong, RequestFailed, ShuttingDown
from ropewalk.server.scheduling.request import FinishReason
from tests.server.fake_engine import counting, make_engine, make_request, slowly

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "engine"] == []


@pytest.fixture
async def start():
    """Starts an engine, which is stopped after the test: it, and the stats of its steps."""
    made = []

    def started(forward=counting, *, engine=None, **options):
        engine, seen = engine or make_engine(forward)[0], []
        running = AsyncEngine({"m": engine}, lambda model, stats: seen.append(stats), **options)
        made.append(running)
        running.start()
        return running, seen

    yield started
    for each in made:
        await each.stop()


def held():
    """A forward that waits to be released, and what releases it."""
    release = threading.Event()

    def forward(batch, kv):
        release.wait(5)
        return counting(batch, kv)

    return forward, release


async def collect(running, request, model="m"):
    return [event async for events in alone(running, request, model) for event in events]


async def alone(running, request, model="m"):
    """The events of one request, as they come."""
    async with aclosing(running.generate(model, [request])) as batches:
        async for batch in batches:
            assert [index for index, _ in batch] == [0]
            yield batch[0][1]


def view_of(engine):
    return engine.view()


async def test_many_callers_at_once(start):
    engine, manager = make_engine(blocks=30)
    running, seen = start(engine=engine)
    requests = [make_request(f"r{i}", [i], max_tokens=3 + i % 5) for i in range(40)]
    answers = await asyncio.gather(*(collect(running, each) for each in requests))
    for i, events in enumerate(answers):
        assert [event.token for event in events] == [(i + 1 + n) % 50 for n in range(3 + i % 5)]
        assert [event.finish is not None for event in events] == [False] * (2 + i % 5) + [True]
    assert running.alive and running.active() == 0
    await running.stop()
    assert sum(stats.generated_tokens for stats in seen) == sum(map(len, answers))
    assert manager.counts().active == 0


async def test_two_models_are_stepped_in_turn():
    first, _ = make_engine()
    second, _ = make_engine()
    running = AsyncEngine({"a": first, "b": second}, lambda model, stats: None)
    running.start()

    async def tokens(model):
        request = make_request("x" + model, [5])
        return [event.token for event in await collect(running, request, model)]

    assert await asyncio.gather(tokens("a"), tokens("b")) == [[6, 7, 8, 9, 10]] * 2
    await running.stop()


async def test_a_model_without_an_engine_refuses_and_another_goes_on(start):
    running, seen = start(slowly)
    await running.add("b", make_engine(slowly)[0])
    left = asyncio.create_task(collect(running, make_request("x", [5], max_tokens=40), "b"))
    stays = asyncio.create_task(collect(running, make_request("y", [5], max_tokens=40)))
    while running.active() < 2:
        await asyncio.sleep(0.001)
    while len(seen) < 4:  # both have tokens
        await asyncio.sleep(0.001)
    await running.remove("b")
    assert isinstance((await left)[-1].error, ModelNotLoaded)
    for ask in (
        partial(running.ask, question=Engine.flush, changes=True),
        partial(running.ask, question=view_of),
        partial(collect, running, make_request("z", [5])),
    ):
        with pytest.raises(ModelNotLoaded):
            await ask(model="b")
    assert len(await stays) == 40
    assert running.outlook("b").idle


async def test_a_refusal_raises_at_the_first_turn(start):
    running, _ = start()
    with pytest.raises(PromptTooLong):
        await collect(running, make_request("a", range(100)))
    assert running.active() == 0


async def test_a_caller_that_leaves_frees_its_blocks(start):
    engine, manager = make_engine(slowly)
    running, seen = start(engine=engine)
    stream = alone(running, make_request("a", [1], max_tokens=90))
    await anext(stream)
    steps = len(seen)
    await stream.aclose()
    while manager.counts().active:
        await asyncio.sleep(0.001)
    # The step under way when it left, and the one that saw it gone.
    assert len(seen) <= steps + 3


async def test_cancelling_a_caller_aborts_too(start):
    engine, manager = make_engine(slowly)
    running, _ = start(engine=engine)
    task = asyncio.create_task(collect(running, make_request("a", [1], max_tokens=90)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(2):
        while manager.counts().active:
            await asyncio.sleep(0.001)


async def test_stop_ends_open_streams_with_an_error(start):
    running, _ = start(slowly)
    task = asyncio.create_task(collect(running, make_request("a", [1], max_tokens=90)))
    await asyncio.sleep(0.05)
    await running.stop()
    events = await task
    assert isinstance(events[-1].error, ShuttingDown)
    with pytest.raises(ShuttingDown):
        await collect(running, make_request("b", [1]))


async def test_an_answer_ends_once(start):
    """Whatever the thread's end says to all, a finished answer that is yet to be read stays so."""
    running, seen = start()
    stream = alone(running, make_request("a", [1], max_tokens=1))
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # it has asked and now waits
    while not any(stats.ended for stats in seen):
        time.sleep(0.001)  # the loop is kept from delivering
    asyncio.get_running_loop().call_soon(running._end_streams, ShuttingDown("over"))
    events = await reading
    assert [event.finish for event in events] == [FinishReason.LENGTH]
    await stream.aclose()


async def test_a_thread_that_is_stuck_does_not_keep_the_process(start, monkeypatch, caplog):
    monkeypatch.setattr(async_engine, "STOP_SECONDS", 0.05)
    stuck, release = held()
    running, _ = start(stuck)
    task = asyncio.create_task(collect(running, make_request("a", [1])))
    await asyncio.sleep(0.05)
    await running.stop()
    with pytest.raises(ShuttingDown):
        await task
    assert running.failure is not None
    assert "stuck" in caplog.text
    release.set()
    await asyncio.to_thread(running._thread.join)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt])
async def test_a_failing_thread_tells_everybody(start, kind, caplog):
    engine, _ = make_engine(slowly)

    def broken():
        raise kind("state is lost")

    told = threading.Event()
    running, _ = start(engine=engine, on_failure=told.set)
    task = asyncio.create_task(collect(running, make_request("a", [1], max_tokens=90)))
    await asyncio.sleep(0.05)
    engine.step = broken
    events = await task
    assert isinstance(events[-1].error, ShuttingDown)
    assert running.failure is not None
    assert not running.alive
    assert told.wait(2)
    assert "state is lost" in caplog.text
    with pytest.raises(ShuttingDown):
        await collect(running, make_request("b", [1]))


async def test_a_step_that_never_ends_is_not_alive(start, monkeypatch):
    monkeypatch.setattr(async_engine, "STALL_SECONDS", 0.05)
    stuck, release = held()
    running, _ = start(stuck)
    assert running.alive
    task = asyncio.create_task(collect(running, make_request("a", [1], max_tokens=1)))
    await asyncio.sleep(0.2)
    assert not running.alive
    release.set()
    await task
    await asyncio.sleep(0.01)
    assert running.alive  # idle is no stall


async def test_a_step_that_never_ends_is_the_end(start, monkeypatch, caplog):
    monkeypatch.setattr(async_engine, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(async_engine, "WATCH_SECONDS", 0.05)
    told, (stuck, release) = threading.Event(), held()
    engine, _ = make_engine(stuck)
    running, _ = start(engine=engine, on_failure=told.set)
    await asyncio.sleep(0.3)
    assert running.failure is None  # idle is no stall
    with pytest.raises(ShuttingDown, match="stuck"):
        await collect(running, make_request("a", [1]))
    assert told.is_set() and "stuck in a step" in caplog.text
    with pytest.raises(ShuttingDown, match="stuck"):
        await collect(running, make_request("b", [1]))
    began = time.monotonic()
    await running.stop()  # does not wait for it again
    assert time.monotonic() - began < 1
    release.set()
    await asyncio.to_thread(running._thread.join)
    assert running.failure == "The engine is stuck; the server must be restarted."


async def test_steps_that_are_slow_but_end_are_no_stall(start, monkeypatch):
    """As after the whole process was stopped for a while: the step that lasted ends then."""
    monkeypatch.setattr(async_engine, "STALL_SECONDS", 0.01)
    monkeypatch.setattr(async_engine, "WATCH_SECONDS", 0.3)

    def slow(batch, kv):
        time.sleep(0.15)
        return counting(batch, kv)

    running, _ = start(slow)
    events = await collect(running, make_request("a", [1], max_tokens=6))
    assert [event.token for event in events] == [2, 3, 4, 5, 6, 7]
    assert running.failure is None


async def test_idle_engines_are_stepped_now_and_then(start):
    running, seen = start(idle_s=0.01)
    while len(seen) < 5:
        await asyncio.sleep(0.005)
    events = await collect(running, make_request("a", [1]))
    assert [event.token for event in events] == [2, 3, 4, 5, 6]


async def test_a_look_is_answered_while_idle_and_steps_nothing(start):
    running, seen = start()
    view = await running.ask("m", view_of)
    assert (view.running, view.waiting, dict(view.shared)) == ((), 0, {})
    assert (view.blocks.free, view.blocks.active) == (39, 0)
    assert seen == []
    assert running._asked == set()


async def test_a_look_is_answered_between_two_steps(start):
    """Each table fits the tokens, as it does not while a step is computed."""
    running, _ = start(slowly)
    task = asyncio.create_task(collect(running, make_request("a", range(9), max_tokens=20)))
    await asyncio.sleep(0)
    for _ in range(5):
        view = await running.ask("m", view_of)
        (request,) = view.running
        assert (request.id, request.dropped, request.source) == ("a", 0, None)
        assert request.known == request.stored.computed + 1
        assert len(request.stored.blocks) == -(-request.stored.computed // 4)
        assert request.stored.bases == tuple(range(0, 4 * len(request.stored.blocks), 4))
        assert view.blocks.active == len(request.stored.blocks)
        assert view.audit.sealed_now == request.stored.computed // 4
    kept = request.stored.blocks
    await task
    assert len(kept) > 2  # what was seen stays as it was
    assert (await running.ask("m", view_of)).running == ()


async def test_a_look_of_someone_who_left_harms_nobody(start):
    running, _ = start(slowly)
    task = asyncio.create_task(collect(running, make_request("a", [1])))
    look = asyncio.create_task(running.ask("m", view_of))
    await asyncio.sleep(0)
    look.cancel()
    assert len(await task) == 5
    assert (await running.ask("m", view_of)).waiting == 0


async def test_a_look_at_an_engine_that_ends_is_refused(start, caplog):
    engine, _ = make_engine()
    stepping, release = threading.Event(), threading.Event()

    def broken():
        stepping.set()
        release.wait(5)
        raise RuntimeError("state is lost")

    engine.step = broken
    running, _ = start(engine=engine)
    task = asyncio.create_task(collect(running, make_request("a", [1])))
    while not stepping.is_set():
        await asyncio.sleep(0.001)
    look = asyncio.create_task(running.ask("m", view_of))
    await asyncio.sleep(0)  # it has asked and now waits
    release.set()
    for ended in (look, task):
        with pytest.raises(ShuttingDown):
            await ended
    with pytest.raises(ShuttingDown):
        await running.ask("m", view_of)


async def test_a_look_that_fails_stops_nothing(start, caplog):
    engine, _ = make_engine()

    def broken():
        raise RuntimeError("no such block")

    engine.view = broken
    running, _ = start(engine=engine)
    with pytest.raises(RequestFailed):
        await running.ask("m", view_of)
    assert "no such block" in caplog.text
    assert len(await collect(running, make_request("a", [1]))) == 5


async def test_a_change_that_fails_half_done_is_the_end(start, caplog):
    def broken(engine):
        raise RuntimeError("half of it")

    running, _ = start()
    with pytest.raises(ShuttingDown):
        await running.ask("m", broken, changes=True)
    assert running.failure is not None and "half of it" in caplog.text


async def test_a_flush_is_observed_before_it_is_answered(start):
    engine, manager = make_engine()
    running, seen = start(engine=engine)
    await collect(running, make_request("a", range(9)))
    assert manager.counts().cached == 3
    assert await running.ask("m", Engine.flush, changes=True) == 3
    assert (seen[-1].flushed_blocks, seen[-1].blocks.cached) == (3, 0)
    assert await running.ask("m", Engine.flush, changes=True) == 0
    assert sum(stats.flushed_blocks for stats in seen) == 3


async def test_a_flush_beside_a_running_request_leaves_it_alone(start):
    engine, manager = make_engine(slowly)
    running, _ = start(engine=engine)
    task = asyncio.create_task(collect(running, make_request("a", range(9), max_tokens=20)))
    while not manager.sequences:
        await asyncio.sleep(0.001)
    assert await running.ask("m", Engine.flush, changes=True) == 0
    assert len(await task) == 20
    await running.stop()
    with pytest.raises(ShuttingDown):
        await running.ask("m", Engine.flush, changes=True)
