"""Models that come and go while a server runs, in the words of llama.cpp's router mode.

One is loaded at a time, in a thread that gives way to the engine's. Who asks for it meanwhile
waits. Where there is no room for it, the model goes that was asked least recently, but none that is
answering.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk.server.app.cache import CachePlanner
from ropewalk.server.config import ModelSource, ServerConfig
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.engine.openmp import end_idle_threads
from ropewalk.server.errors import RESTART_SECONDS, CommandError, ModelNotLoaded, ServeError
from ropewalk.server.hardware import return_freed_memory
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.served_models import Models, Served, all_names

if TYPE_CHECKING:
    from ropewalk.server.launch.build import Loaded

log = getLogger(__name__)

NICE = 5  # so that a step of the engine has the processor first
RETRY_SECONDS = 60.0  # after a load that failed, until a request begins another

# The source, how many models are in memory already, and what ends the load by raising.
Load = Callable[[ModelSource, int, Callable[[], None]], "Loaded"]
Look = Callable[[ModelSource], None]  # raises CommandError for files that cannot be loaded
T = TypeVar("T")


class Status(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"  # its last requests are being answered, or its memory is being freed


@dataclass(slots=True, eq=False)
class _Place:
    """Of a model that may be loaded."""

    source: ModelSource
    status: Status = Status.UNLOADED
    uses: int = 0  # requests that hold it
    waits: int = 0  # requests that will as soon as it is loaded
    asked: float = 0.0  # monotonic, last
    failure: str | None = None  # why it could not be loaded last time
    retry_at: float = 0.0  # monotonic


class Registry(Models):
    """Touched by the event loop only."""

    def __init__(
        self,
        config: ServerConfig,
        loaded: Sequence["Loaded"],
        engine: AsyncEngine,
        metrics: Metrics,
        planners: dict[str, CachePlanner],
        load: Load,
        look: Look,
    ) -> None:
        """loaded: those of the configuration's models that are in `engine` already.

        planners: by model; kept as models come and go.
        """
        super().__init__(one.served for one in loaded)
        self._loaded = {one.served.name: one for one in loaded}
        sources = (*config.models, *config.others)
        self.names = all_names((source.name, source.aliases) for source in sources)
        self._places = {source.name: _Place(source) for source in sources}
        for name in self._loaded:
            self._places[name].status = Status.LOADED
        self._most = config.max_models
        self._autoload = config.models_autoload
        self._patience = config.limits.max_queue_time
        self._drain_seconds = config.drain_timeout_s
        self._engine = engine
        self._metrics = metrics
        self._planners = planners
        self._load_one = load
        self._look = look
        self._thread = ThreadPoolExecutor(1, "models", initializer=os.nice, initargs=(NICE,))
        self._turn = asyncio.Lock()  # one load at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closing = False

    def __iter__(self) -> Iterator[Served]:
        places = self._places.items()
        return (self._served[name] for name, place in places if place.status is Status.LOADED)

    def get(self, name: str) -> Served | None:
        return self._served[name] if self._places[name].status is Status.LOADED else None

    def status(self, name: str) -> Mapping[str, object]:
        place = self._places[name]
        failed = {"failed": True} if place.failure is not None else {}
        return {"value": place.status.value, **failed}

    async def hold(self, name: str, until: ExitStack) -> Served:
        """Loads it if need be and if that is wanted. Raises ModelNotLoaded."""
        place = self._places[name]
        place.asked = time.monotonic()
        if place.status is not Status.LOADED:
            place.waits += 1
            try:
                await self._wait_for(place)
            finally:
                place.waits -= 1
                self._tell()
        place.uses += 1
        until.callback(self._let_go, place)
        return self._served[name]

    async def load(self, name: str) -> None:
        """Returns when it is loaded. Raises ModelNotLoaded, with the reason."""
        place = self._places[name]
        place.asked = time.monotonic()
        await self._until(lambda: place.status is not Status.UNLOADING)
        if place.status is Status.UNLOADED:
            self._begin(place, Status.LOADING, self._load(place))
        await self._until(lambda: place.status is not Status.LOADING)
        if place.status is not Status.LOADED:
            raise self._no_load(place)

    async def unload(self, name: str) -> None:
        """Returns when its memory is free. Requests that run have the drain's time to end."""
        place = self._places[name]
        await self._until(lambda: place.status is not Status.LOADING)
        if place.status is Status.LOADED:
            self._begin(place, Status.UNLOADING, self._unload(place, self._drain_seconds))
        await self._until(lambda: place.status is not Status.UNLOADING)

    async def close(self) -> None:
        """Ends a load that is under way."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    # ------------------------------------------------------------------------------ for requests

    async def _wait_for(self, place: _Place) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._until(lambda: place.status is not Status.UNLOADING)
                if place.status is Status.UNLOADED and self._may_load(place):
                    self._begin(place, Status.LOADING, self._load(place))
                await self._until(lambda: place.status is not Status.LOADING)
        except TimeoutError:
            pass
        if place.status is not Status.LOADED:
            raise self._refusal(place)

    def _may_load(self, place: _Place) -> bool:
        return self._autoload and time.monotonic() >= place.retry_at

    def _refusal(self, place: _Place) -> ModelNotLoaded:
        name = place.source.name
        full = self._full()
        if place.status is Status.UNLOADING or (place.status is Status.LOADING and not full):
            return _later(f"{name} is {place.status.value}")
        if place.status is Status.UNLOADED and not self._autoload:
            return ModelNotLoaded(
                f"{name} is not loaded; an operator can load it with POST /v1/models/load, or "
                "start the server with --models-autoload",
                retry_after=None,
            )
        if place.failure is None:
            return self._no_load(place)
        return ModelNotLoaded(
            f"{name} could not be loaded; the server's log says why, and so does the answer to "
            "POST /v1/models/load",
            retry_after=None,
        )

    def _no_load(self, place: _Place) -> ModelNotLoaded:
        """For whoever asked for the load. The reason may show paths of this machine."""
        name = place.source.name
        if place.failure is None:
            return _later(
                f"{name} is not loaded, as all {self._most} models that are (--max-models) answer "
                "requests"
            )
        return ModelNotLoaded(f"{name} could not be loaded: {place.failure}", retry_after=None)

    def _let_go(self, place: _Place) -> None:
        place.uses -= 1
        place.asked = time.monotonic()
        if not place.uses:
            self._tell()

    # ----------------------------------------------------------------------------------- changes

    def _begin(self, place: _Place, status: Status, work: Coroutine[Any, Any, None]) -> None:
        place.status = status
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, place: _Place) -> None:
        source, status, place.failure = place.source, Status.UNLOADED, None
        name = source.name
        try:
            async with self._turn:
                if self._full():  # no other goes for a model whose files are no good
                    await self._beside(self._tried, name, partial(self._look, source))
                if not await self._has_room():
                    return
                began = time.monotonic()
                work = partial(self._load_one, source, len(self._served), self._check)
                await self._take_in(name, await self._beside(self._tried, name, work))
            status = Status.LOADED
            log.info("loaded %s in %.1f s", name, time.monotonic() - began)
        except (CommandError, ServeError) as error:
            place.failure = str(error)
            place.retry_at = time.monotonic() + RETRY_SECONDS
            log.error("%s could not be loaded: %s", name, error)
            self._metrics.remove_model(name)
        finally:
            place.status = status
            self._tell()

    def _tried(self, name: str, work: Callable[[], T]) -> T:
        """Called in the thread. Raises CommandError."""
        try:
            return work()
        except CommandError as error:
            failure = str(error)
        except Exception:
            log.exception("%s could not be loaded", name)
            failure = "it failed unexpectedly; see the server's log"
        finally:
            end_idle_threads()
        return_freed_memory()
        raise CommandError(failure)  # a new one: the other's traceback holds what was loaded

    def _check(self) -> None:
        if self._closing:
            raise CommandError("the server is shutting down")

    async def _take_in(self, name: str, loaded: "Loaded") -> None:
        await self._engine.add(name, loaded.engine)
        self._planners[name] = loaded.planner
        self._served[name] = loaded.served
        self._loaded[name] = loaded

    async def _has_room(self) -> bool:
        """Waits until there is room for one more, and makes it as soon as a model is idle."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while self._full():
                    idle = [
                        place
                        for place in self._places.values()
                        if place.status is Status.LOADED and not (place.uses or place.waits)
                    ]
                    if idle and not self._count(Status.UNLOADING):
                        oldest = min(idle, key=lambda place: place.asked)
                        self._begin(oldest, Status.UNLOADING, self._unload(oldest, 0))
                    await self._changed.wait()
                return True
        return False

    def _full(self) -> bool:
        return self._count(Status.LOADED, Status.UNLOADING) >= self._most

    def _count(self, *statuses: Status) -> int:
        return sum(place.status in statuses for place in self._places.values())

    async def _unload(self, place: _Place, seconds: float) -> None:
        """Whoever still uses it has that time to end."""
        name = place.source.name
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._until(lambda: not place.uses)
            del self._served[name], self._planners[name]
            await self._engine.remove(name)
            self._metrics.remove_model(name)
            await self._beside(_free, [self._loaded.pop(name)])
            log.info("unloaded %s", name)
        except Exception:
            log.exception("%s could not be unloaded cleanly", name)
        finally:
            place.status = Status.UNLOADED
            self._tell()

    async def _beside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns in the thread."""
        call = partial(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _tell(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._changed.wait()


def _later(said: str) -> ModelNotLoaded:
    seconds = RESTART_SECONDS
    return ModelNotLoaded(f"{said}; send the request again in {seconds} s", retry_after=seconds)


def _free(last: list[object]) -> None:
    """Lets go of what only the list holds: to free so much memory takes a while."""
    last.clear()
    return_freed_memory()
