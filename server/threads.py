"""Who computes has OpenMP's threads to itself: the engine, once models are loaded.

GNU's OpenMP counts the threads that it keeps for each thread that has computed. Once there are
more than cores in all, one that waits sleeps at once, and waking it takes longer than most parts
of a layer that threads wait between: steps took up to twice as long.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_OMP_PAUSE_SOFT = 1  # as OpenMP 5.0 numbers it


def end_idle_threads() -> None:
    """Those that OpenMP keeps for the thread that calls this. It gets others when it needs them."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)


def use_all_threads() -> None:
    """As many as torch was told of, for kernels that the calling thread calls.

    OpenMP keeps that number for each thread, and tells others of it only when torch computes.
    """
    torch.set_num_threads(torch.get_num_threads())


async def aside(compute: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What it returns, computed in a thread beside the event loop's and the engine's."""

    def computed() -> T:
        use_all_threads()
        try:
            return compute(*arguments, **named)
        finally:
            end_idle_threads()

    return await asyncio.to_thread(computed)
