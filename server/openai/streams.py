"""Reads the generations of one answer as a single stream.

Knows asynchronous generators of event lists, but not the events.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from ropewalk.server.scheduling.request import TokenEvent

Events = AsyncGenerator[list[TokenEvent], None]


class Streams(Protocol):
    async def next(self) -> list[tuple[int, list[TokenEvent]]]:
        """The events since the last call, by index; empty once all generators have ended.

        Raises the error that a generator raised.
        """
        ...

    async def stop(self, index: int) -> None:
        """Close one generator early."""
        ...

    async def close(self) -> None:
        """Close all of them. Needed whenever `next` has not returned an empty list."""
        ...


def read_together(
    generators: Sequence[Events], begun: Callable[[], None] = lambda: None
) -> Streams:
    """`begun` is called whenever there are events, so at the first of them."""
    return _One(generators[0], begun) if len(generators) == 1 else _Many(generators, begun)


class _One:
    """The usual case: no task between the engine and the response."""

    def __init__(self, generator: Events, begun: Callable[[], None]) -> None:
        self._generator = generator
        self._begun = begun

    async def next(self) -> list[tuple[int, list[TokenEvent]]]:
        try:
            events = await anext(self._generator)
            self._begun()
            return [(0, events)]
        except StopAsyncIteration:
            return []

    async def stop(self, index: int) -> None:
        await self._generator.aclose()

    async def close(self) -> None:
        await self._generator.aclose()


class _Many:
    def __init__(self, generators: Sequence[Events], begun: Callable[[], None]) -> None:
        self._begun = begun
        self._pending: dict[int, list[TokenEvent]] = {}
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._tasks = [
            asyncio.create_task(self._pump(index, generator))
            for index, generator in enumerate(generators)
        ]
        self._running = len(self._tasks)

    async def next(self) -> list[tuple[int, list[TokenEvent]]]:
        while not self._pending and self._error is None and self._running:
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return list(pending.items())

    async def stop(self, index: int) -> None:
        self._tasks[index].cancel()
        await asyncio.wait([self._tasks[index]])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _pump(self, index: int, generator: Events) -> None:
        try:
            async for events in generator:
                self._begun()
                self._pending.setdefault(index, []).extend(events)
                self._wake.set()
        except Exception as error:
            # A failed generation fails the whole answer: `next` raises the error again.
            self._error = self._error or error
        finally:
            self._running -= 1
            self._wake.set()
            await generator.aclose()
