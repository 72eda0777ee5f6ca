"""The asyncio side of the one engine thread: submit, iterate, abort, supervise.

The thread steps every model's engine in turn and owns all their state. Commands reach it
through one inbox, events come back through one callback on the event loop per step. Questions
about a cache go through the same inbox and are answered with plain data.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from ropewalk.server.engine.engine import Engine
from ropewalk.server.engine.openmp import use_all_threads
from ropewalk.server.errors import ModelNotLoaded, RequestFailed, ServeError, ShuttingDown
from ropewalk.server.scheduling.request import FinishReason, Outlook, Request, StepStats, TokenEvent

log = getLogger(__name__)

T = TypeVar("T")
Batch = list[tuple[int, list[TokenEvent]]]  # events of some of the requests, by their index

IDLE = Outlook(idle=True)
STALL_SECONDS = 120.0
WATCH_SECONDS = 5.0
STOP_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Stream:
    """What one caller of `generate` waits on. Touched by the event loop only, like its parts."""

    model: str
    open: int  # requests whose last event is still to be dispatched
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ready: list["_Part"] = field(default_factory=list)  # those with events


@dataclass(slots=True, eq=False)
class _Part:
    """What a stream has of one of its requests."""

    stream: _Stream
    index: int
    events: list[TokenEvent] = field(default_factory=list)
    started: bool = False  # some were yielded
    ended: bool = False  # its last event has been dispatched; whatever comes later is dropped


class _Command(NamedTuple):
    """Done on the engine's thread before a step of the model; one that only `looks`, after it."""

    model: str
    act: Callable[[], object]
    answer: "asyncio.Future[Any] | None"  # to what it returns; touched by the event loop only
    looks: bool


class AsyncEngine:
    """Generates for many callers on one event loop.

    `observe` is called on the engine thread after every step of a model. The engine is unsound
    when more than `max_mutated_blocks` cached blocks, over all models, were found changed, when
    fewer leave no room for a whole context, when weights were found changed, and from the start if
    there are `defects`, a sentence by model.

    Idle engines are stepped every `idle_s` seconds, so that changes in memory are found then, too.

    Engines come and go: `others` is what to expect of a model that has none.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        observe: Callable[[str, StepStats], None],
        *,
        on_failure: Callable[[], None] = lambda: None,
        max_mutated_blocks: int = 3,
        defects: Mapping[str, str] = MappingProxyType({}),
        idle_s: float | None = None,
        others: Outlook = IDLE,
    ) -> None:
        self.failure: str | None = None
        self._engines = engines  # replaced by the engine's thread, never changed
        self._others = others
        self._observe = observe
        self._on_failure = on_failure
        self._max_mutated_blocks = max_mutated_blocks
        self._defects = defects
        self._idle_s = idle_s
        self._outlooks = {name: engine.outlook() for name, engine in engines.items()}
        self._parts: dict[str, _Part] = {}  # by request
        self._asked: set[asyncio.Future[Any]] = set()
        self._inbox: list[_Command] = []
        self._inbox_changed = threading.Condition()
        self._stopping = False
        self._stepped = dict.fromkeys(engines, time.monotonic())  # when each began its last step
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call from the event loop that will call `generate`."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watching = self._loop.create_task(self._watch())

    async def stop(self) -> None:
        """End the thread after its current step; open streams end with an error.

        A thread stuck for STOP_SECONDS is left behind as a failure: it must not keep the process.
        """
        with self._inbox_changed:
            self._stopping = True
            self._inbox_changed.notify()
        if self._watching is not None:
            self._watching.cancel()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, STOP_SECONDS if self.failure is None else 0)
            if self._thread.is_alive():
                self.failure = self.failure or "The engine did not stop; restart the server."
                log.error("the engine is stuck in a step; shutting down without waiting for it")
        self._end_streams(ShuttingDown())

    @property
    def alive(self) -> bool:
        """The thread runs, and no step has taken longer than STALL_SECONDS. Idle is alive."""
        began = self._step_began
        stalled = began is not None and time.monotonic() - began > STALL_SECONDS
        return self.failure is None and self._thread.is_alive() and not stalled

    @property
    def unsound(self) -> str | None:
        """Why clients should use another server although this one is alive; None when sound."""
        for name, engine in self._engines.items():
            if name in self._defects:
                return self._defects[name]
            if engine.weights_changed:
                return (
                    f"the weights of {name} changed in memory; restart the server, on another "
                    "machine if it happens again"
                )
        mutated = sum(engine.mutated_blocks for engine in self._engines.values())
        if mutated > self._max_mutated_blocks:
            return (
                f"{mutated} cached blocks changed in memory, more than the "
                f"{self._max_mutated_blocks} tolerated; restart the server, on another machine if "
                "it happens again"
            )
        for name, engine in self._engines.items():
            if not engine.holds_context:
                return (
                    f"cached blocks changed in memory, and the remaining blocks of {name} cannot "
                    "hold a request of its full context; restart the server, on another machine if "
                    "it happens again"
                )
        return None

    def active(self) -> int:
        """How many requests have a caller of `generate` waiting."""
        return len(self._parts)

    def outlook(self, model: str) -> Outlook:
        """What a new request for that model has to expect, as of its last step."""
        return self._outlooks.get(model, self._others)

    async def generate(
        self, model: str, requests: Sequence[Request]
    ) -> AsyncGenerator[Batch, None]:
        """Yields the events since the last iteration, at least one, by index into `requests`.

        The final one of each request has a `finish`. Raises ServeError where a request is refused
        or ends before its first token. Closing the generator early aborts all that have not ended.
        """
        self._require_running()
        stream = _Stream(model, open=len(requests))
        parts = {request.id: _Part(stream, index) for index, request in enumerate(requests)}
        self._parts |= parts
        self._post(model, *(partial(self._submit, model, request) for request in requests))
        try:
            while stream.open or stream.ready:
                await stream.wake.wait()
                stream.wake.clear()
                ready, stream.ready = stream.ready, []
                batch = []
                for part in ready:
                    events, part.events = part.events, []
                    last = events[-1]
                    if last.error is not None and last.token is None and not part.started:
                        raise last.error
                    part.started = True
                    batch.append((part.index, events))
                if batch:
                    yield batch
        finally:
            for request_id in parts:
                del self._parts[request_id]
            left = [request_id for request_id, part in parts.items() if not part.ended]
            self._post(model, *(partial(self._abort, model, request_id) for request_id in left))

    def abort(self, model: str, request: Request) -> None:
        """End one of the requests that are being generated; no more of its events come.

        What is kept of it ends with what it had answered.
        """
        part = self._parts[request.id]
        if part.ended:
            return
        part.ended = True
        part.stream.open -= 1
        part.stream.wake.set()  # it may have been the last one
        self._post(model, partial(self._abort, model, request.id))
        if request.keep:
            self._post(model, partial(self._shorten, model, request))

    async def ask(self, model: str, question: Callable[[Engine], T], *, changes: bool = False) -> T:
        """What `question` returns or raises of a model's engine, on its thread, between two steps.

        changes: whether it does more than look. By the time this returns, `observe` has then seen
        what it did counted. Raises ServeError besides.
        """
        act = partial(self._outcome, model, question, changes)
        return cast(T, await self._ask(model, act, looks=not changes))

    async def add(self, model: str, engine: Engine) -> None:
        """From now on requests for the model go to this engine. Raises ServeError."""
        await self._ask(model, partial(self._put, model, engine))

    async def remove(self, model: str) -> None:
        """Lets go of a model's engine; streams that are open end with an error.

        Raises ServeError.
        """
        await self._ask(model, partial(self._put, model, None))
        left = [name for name, part in self._parts.items() if part.stream.model == model]
        self._dispatch([_ended(name, _unloaded(model)) for name in left])

    async def _ask(self, model: str, act: Callable[[], object], *, looks: bool = False) -> object:
        self._require_running()
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._asked.add(answer)
        self._post(model, act, answer=answer, looks=looks)
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    def _require_running(self) -> None:
        if self.failure is not None or self._stopping:
            raise ShuttingDown(self.failure)

    def _post(
        self,
        model: str,
        *acts: Callable[[], object],
        answer: "asyncio.Future[Any] | None" = None,
        looks: bool = False,
    ) -> None:
        with self._inbox_changed:
            self._inbox += [_Command(model, act, answer, looks) for act in acts]
            self._inbox_changed.notify()

    # ------------------------------------------------------------------ on the event loop

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            part = self._parts.get(event.request_id)
            if part is None or part.ended:  # its caller has left, or has had its last event
                continue
            stream = part.stream
            if event.finish is not None:
                part.ended = True
                stream.open -= 1
            if not part.events:
                stream.ready.append(part)
            part.events.append(event)
            stream.wake.set()

    async def _watch(self) -> None:
        """Fail when a step does not end. Of a process that was stopped for long, it soon does."""
        stalled: float | None = None
        while self.failure is None:
            await asyncio.sleep(WATCH_SECONDS)
            began = self._step_began
            if began is not None and began == stalled:
                log.error("the engine is stuck in a step, for more than %d s", STALL_SECONDS)
                self._fail("The engine is stuck; the server must be restarted.")
            late = began is not None and time.monotonic() - began > STALL_SECONDS
            stalled = began if late else None

    def _end_streams(self, error: ServeError) -> None:
        self._dispatch([_ended(request_id, error) for request_id in self._parts])
        for answer in self._asked:
            _settle(answer, error)

    # --------------------------------------------------------------- on the engine thread

    def _run(self) -> None:
        use_all_threads()
        try:
            while self._turn():
                pass
        except BaseException:  # the thread's last resort: say so, end every stream, never hang
            log.exception("the engine failed")
            self._fail("The engine failed; the server must be restarted.")

    def _fail(self, failure: str) -> None:
        """End the server. May be called from any thread."""
        self.failure = failure
        self._call(self._end_streams, ShuttingDown(failure))
        self._on_failure()

    def _turn(self) -> bool:
        """Apply the commands that arrived and step every engine once; False when stopping."""
        with self._inbox_changed:
            self._inbox_changed.wait_for(self._due, self._idle_s)
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        self._step_began = time.monotonic()
        acts = [command for command in commands if not command.looks]
        looks = [command for command in commands if command.looks]
        touched = {command.model for command in acts}
        outcomes = [command.act() for command in acts]
        for model, engine in self._engines.items():
            if engine.busy or model in touched or self._is_neglected(model):
                self._stepped[model] = time.monotonic()
                step = engine.step()
                if step.events:
                    self._call(self._dispatch, step.events)
                self._outlooks[model] = step.stats.outlook
                self._observe(model, step.stats)
        outcomes += [command.act() for command in looks]
        for command, outcome in zip((*acts, *looks), outcomes, strict=True):
            if command.answer is not None:
                self._call(_settle, command.answer, outcome)
        self._step_began = None
        return True

    def _due(self) -> bool:
        busy = any(engine.busy for engine in self._engines.values())
        return bool(self._inbox) or self._stopping or busy

    def _is_neglected(self, model: str) -> bool:
        """Whether it is time to look at the memory of a model that nobody asks."""
        return self._idle_s is not None and time.monotonic() - self._stepped[model] >= self._idle_s

    def _submit(self, model: str, request: Request) -> None:
        engine = self._engines.get(model)
        try:
            if engine is None:
                raise _unloaded(model)
            engine.submit(request)
            return
        except ServeError as refused:
            error = refused
        except Exception:  # a bug in accepting one request must not end the thread
            log.exception("a request could not be queued")
            error = RequestFailed("The request could not be queued.")
        self._call(self._dispatch, [_ended(request.id, error)])

    def _abort(self, model: str, request_id: str) -> None:
        if (engine := self._engines.get(model)) is not None:
            engine.abort(request_id)

    def _shorten(self, model: str, request: Request) -> None:
        if (engine := self._engines.get(model)) is not None:
            engine.shorten_kept(request)

    def _put(self, model: str, engine: Engine | None) -> None:
        others = {name: other for name, other in self._engines.items() if name != model}
        if engine is None:
            self._engines = others
            self._outlooks.pop(model, None)
        else:
            self._engines = others | {model: engine}
            self._outlooks[model] = engine.outlook()
        self._stepped[model] = time.monotonic()

    def _outcome(self, model: str, question: Callable[[Engine], object], changes: bool) -> object:
        engine = self._engines.get(model)
        if engine is None:
            return _unloaded(model)
        try:
            return question(engine)
        except ServeError as error:
            return error
        except Exception:  # of any kind: a look that fails must not end the thread
            if changes:  # but half a change may have left a cache that contradicts itself
                raise
            log.exception("a question about a cache could not be answered")
            return RequestFailed("The cache could not be inspected.")

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            log.debug("events after the event loop closed")


def _settle(answer: "asyncio.Future[Any]", outcome: object) -> None:
    if answer.done():  # its caller may have left
        return
    if isinstance(outcome, ServeError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _unloaded(model: str) -> ModelNotLoaded:
    return ModelNotLoaded(f"{model} has been unloaded; send the request again", retry_after=1)


def _ended(request_id: str, error: ServeError) -> TokenEvent:
    return TokenEvent(request_id, None, FinishReason.ERROR, error=error)
