"""A stream of what a cache holds: a snapshot, then what has changed since. Numbers only, no text.

One look is shared by all who listen to a model, and nobody looks while nobody listens. A listener
that missed a change, because it reads slowly, gets another snapshot instead. Looks are as rare as
it takes for them, and for writing what they found, to cost next to nothing.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import cached_property
from json import dumps
from logging import getLogger

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from ropewalk.cache.manager import PoolView
from ropewalk.server.app.cache import (
    CachePlanner,
    counts,
    described,
    described_kept,
    described_request,
    shared,
)
from ropewalk.server.app.openai import EngineResponse, Serving
from ropewalk.server.engine.cache_view import CacheView
from ropewalk.server.engine.engine import Engine
from ropewalk.server.errors import InternalError, ModelNotLoaded, QueueFull, ServeError
from ropewalk.server.http.door import Visit
from ropewalk.server.http.middleware import state_of
from ropewalk.server.http.streaming import STREAM_HEADERS, Drain, EventStream
from ropewalk.server.long_work import off_loop

MOST_LISTENERS = 32  # to all models
LEAST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
MOST_WRITE_S = 0.0005
SHARE = 0.005  # of the time that looking, comparing and writing may take
NEAR = 8  # unchanged blocks between two runs that are cheaper to send than to leave out
MANY = 8192  # blocks in tables, which take some milliseconds to write

log = getLogger(__name__)
_NEW = object()  # equals no field's value


async def cache_stream(
    serving: Serving,
    planners: Mapping[str, CachePlanner],
    watches: dict[str, "Watch"],
    request: Request,
    model: str | None,
) -> Response:
    """watches: those that somebody listens to, by model; kept here."""
    name = serving.models.name(model)
    if serving.models.get(name) is None:  # to look at a cache must load nothing
        raise ModelNotLoaded(f"{name} is not loaded, so it has no cache", retry_after=None)

    def entry(view: CacheView) -> dict[str, object]:
        served = serving.models.get(name)  # not held: who looks on must not keep it in memory
        if served is None:
            raise ModelNotLoaded(f"{name} has been unloaded", retry_after=None)
        return described(served, planners[name], view)

    def begin() -> Watch:
        return Watch(lambda: serving.engine.ask(name, Engine.view), entry, serving.drain)

    state_of(request.scope)["model"] = name
    return CacheStream(serving, name, watches, begin)


class CacheStream(EngineResponse):
    """Lasts until the client leaves, the model is unloaded or the server ends."""

    _seconds = math.inf
    _ping_s = 1.0  # a client that closed is noticed by the second write after that

    def __init__(
        self,
        serving: Serving,
        model: str,
        watches: dict[str, "Watch"],
        begin: Callable[[], "Watch"],
    ) -> None:
        super().__init__(serving, model, ())
        self._watches = watches
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if state_of(scope)["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await super().__call__(scope, receive, send)

    async def _run(self, out: EventStream, visit: Visit | None) -> None:
        watches, model = self._watches, self._model
        if sum(each.listeners for each in watches.values()) >= MOST_LISTENERS:
            raise QueueFull(
                f"{MOST_LISTENERS} clients watch caches already; close one of them, or ask for "
                "/v1/cache from time to time"
            )
        watch = watches.get(model)
        if watch is None or watch.failure is not None:  # which some may still have to be told of
            watch = watches[model] = self._begin()
        watch.listeners += 1
        try:
            async with aclosing(watch.events()) as events:
                async for event in events:
                    began = time.thread_time()
                    await out.write(event)
                    # One that had to wait for its client met others' work meanwhile.
                    watch.spent += min(time.thread_time() - began, MOST_WRITE_S)
        finally:
            watch.listeners -= 1
            if not watch.listeners:
                watch.close()
                if watches.get(model) is watch:
                    del watches[model]

    def _left(self) -> None:
        """As every listener does."""

    def _failure(self, error: ServeError) -> str:
        return f"data: {error.body().decode()}\n\n"


class Look:
    """What one look found; `delta` is what the one before lacks."""

    def __init__(
        self,
        view: CacheView,
        entry: Callable[[CacheView], dict[str, object]],
        before: "Look | None",
    ) -> None:
        self.view, self.at = view, time.time()
        self.pool = states(view.pool)
        self.sequences = {
            "request": {each.id: described_request(each) for each in view.running},
            "kept": {each.id: described_kept(each) for each in view.kept},
        }
        self.number: int = 1 if before is None else before.number
        self.delta: bytes | None = None
        self._entry = entry
        changed = {} if before is None else dict(changes(before, self))
        if before is not None and changed:
            self.number += 1
            self.delta = _event({"type": "delta", "at": self.at, **changed})

    @property
    def size(self) -> int:
        """Of the snapshot, in blocks."""
        return sum(len(request.stored.blocks) for request in self.view.running)

    def written(self) -> bytes:
        return self.snapshot

    @cached_property
    def snapshot(self) -> bytes:
        entry = self._entry(self.view)
        whole = {"type": "snapshot", "model": entry["model"], "at": self.at}
        return _event({**whole, "pool": self.pool.tobytes().decode(), "entry": entry})


class Watch:
    """One model's cache, looked at from `begin` to `close`. Touched by the event loop only."""

    def __init__(
        self,
        look: Callable[[], Awaitable[CacheView]],
        entry: Callable[[CacheView], dict[str, object]],
        drain: Drain,
    ) -> None:
        """entry: of /v1/cache. Raises ServeError where there is none any more."""
        self.listeners = 0
        self.failure: ServeError | None = None  # why nothing more comes
        self.spent = 0.0  # seconds of the event loop, since the last look
        self._look = look
        self._entry = entry
        self._drain = drain
        self._latest: Look | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Whole events, from a snapshot on, without end. Raises ServeError."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        seen = 0
        while True:
            while (latest := self._latest) is None or latest.number == seen:
                if self.failure is not None:
                    raise self.failure
                await self._changed.wait()
            if latest.number == seen + 1 and latest.delta is not None and seen:
                event = latest.delta
            else:
                event = await off_loop(latest.written, latest.size, MANY)
            seen = latest.number
            yield event

    async def _watch(self) -> None:
        try:
            while not self._drain.draining:
                view = await self._look()
                began = time.thread_time()
                before = self._latest
                self._latest = Look(view, self._entry, before)
                if before is None or self._latest.number != before.number:
                    self._tell()
                self.spent += time.thread_time() - began
                pause = (view.seconds + self.spent) / SHARE
                self.spent = 0.0
                await asyncio.sleep(min(max(pause, LEAST_PAUSE_S), LONGEST_PAUSE_S))
            self.failure = self._drain.refusal()
        except ServeError as error:
            self.failure = error
        except Exception:  # those who listen must not wait for ever
            log.exception("a cache cannot be watched any more")
            self.failure = InternalError("the server failed on this request; see its log")
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def states(pool: PoolView) -> NDArray[np.uint8]:
    """A letter for each block, by id: f free, c cached, h held by one sequence, s shared by
    several, q quarantined; the reserved block 0 has a dash."""
    holders = np.frombuffer(pool.holders, np.int64)
    found = np.frombuffer(b"fhs", np.uint8)[np.minimum(holders, 2)]
    cached, retired = (np.fromiter(each, np.int64, len(each)) for each in pool[1:])
    found[cached] = ord("c")
    found[retired[holders[retired] == 0]] = ord("q")
    found[0] = ord("-")
    return found


def changes(before: Look, after: Look) -> Iterator[tuple[str, object]]:
    """What a listener has to replace, by field of a delta."""
    if runs := _runs(before.pool, after.pool):
        yield "pool", runs
    old, new = before.view, after.view
    for name, value in counts(new).items():
        if getattr(old, name) != getattr(new, name):
            yield name, value
    if old.shared != new.shared:
        yield "shared", shared(new)
    sequences: dict[str, object] = {}
    order: dict[str, list[str]] = {}
    for kind, are in after.sequences.items():
        were = before.sequences[kind]
        sequences |= {name: None for name in were if name not in are}
        for name, fields in are.items():
            known = were.get(name, {})
            changed = {
                field: value for field, value in fields.items() if known.get(field, _NEW) != value
            }
            if changed:
                sequences[name] = {"kind": kind, **changed}
        follows = [
            *(name for name in were if name in are),
            *(name for name in are if name not in were),
        ]
        if follows != [*are]:  # of requests, where one made room and came back between two looks
            order[kind] = [*are]
    if sequences:
        yield "sequences", sequences
    if order:
        yield "order", order


def _runs(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> list[tuple[int, str]]:
    """The first block and the letters of each run that changed, near ones joined."""
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return []
    ends = np.flatnonzero(np.diff(changed) > NEAR)
    firsts = changed[np.concatenate(([0], ends + 1))]
    lasts = changed[np.concatenate((ends, [len(changed) - 1]))]
    return [
        (first, after[first : last + 1].tobytes().decode())
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]


def _event(data: Mapping[str, object]) -> bytes:
    return f"data: {dumps(data, separators=(',', ':'))}\n\n".encode()
