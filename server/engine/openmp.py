"""Leaves OpenMP's threads to the one thread that computes: the engine's, once models are loaded.

GNU OpenMP keeps a pool of threads for each thread that has computed. Once all pools together have
more threads than there are cores, a waiting thread sleeps at once instead of spinning, and waking
it takes longer than most parts of a layer that end in such a wait: steps took up to twice as long.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ropewalk.server.errors import QueueFull

P = ParamSpec("P")
T = TypeVar("T")

MOST_WAITING = 8
_OMP_PAUSE_SOFT = 1  # as OpenMP 5.0 numbers it


def end_idle_threads() -> None:
    """End the pool that OpenMP keeps for the calling thread, which gets another when needed."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


def use_all_threads() -> None:
    """Let kernels that this thread calls use as many threads as torch is set to.

    OpenMP keeps that number per thread, and a new thread gets torch's only when torch computes.
    """
    torch.set_num_threads(torch.get_num_threads())


async def aside(compute: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run `compute` in a thread of its own, beside the event loop's and the engine's."""

    def computed() -> T:
        use_all_threads()
        try:
            return compute(*arguments, **named)
        finally:
            end_idle_threads()

    return await asyncio.to_thread(computed)


class Turns:
    """`aside` for requests, one computation at a time. One whose caller left goes on to its end."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def aside(self, compute: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Raises QueueFull where MOST_WAITING wait already."""
        if self._waiting >= MOST_WAITING:
            raise QueueFull("others are computed first; send the request again in a few seconds")
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        task = asyncio.create_task(aside(compute, *arguments, **named))
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[T]") -> None:
        self._turn.release()
        if not task.cancelled():
            task.exception()  # which somebody has seen, unless they left
