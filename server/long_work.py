"""Work on long texts and lists, done so that it does not hold up the event loop.

A thread alone is not enough: one call into C that takes long keeps the interpreter from all other
threads. So such calls are cut into pieces, or replaced by ones that let go of it.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from json import dumps
from typing import TypeVar

# Shorter texts are handled on the event loop: that costs less than changing threads.
LONG_TEXT = 4096  # bytes
LONG_LIST = 1024  # entries
# Threads that work beside the event loop. More would only take the interpreter from each other.
WORKERS = 2
# How long a thread that computes may keep the interpreter when others want it; Python's own 5 ms
# add up, because the event loop asks for it several times in each request.
SWITCH_SECONDS = 0.002
PIECE = 4096  # entries of lists that are written in one call: a millisecond or two

T = TypeVar("T")


def share_interpreter() -> None:
    """Call from the event loop: bounds what threads beside it take from it."""
    sys.setswitchinterval(SWITCH_SECONDS)
    workers = ThreadPoolExecutor(WORKERS, "beside")
    asyncio.get_running_loop().set_default_executor(workers)


async def off_loop(work: Callable[[], T], size: int, long: int = LONG_TEXT) -> T:
    """What `work` returns, computed in a thread when it is about more than `long` of something."""
    return await asyncio.to_thread(work) if size > long else work()


def json_text(value: object) -> str:
    """`value` as `json.dumps` writes it, in short calls. Keys are strings."""
    return "".join(_pieces(value))


def json_bytes(value: object) -> bytes:
    return json_text(value).encode()


def longer(value: object, most: int) -> bool:
    """Whether the texts in `value`, which is JSON, have more characters, all else counting 1.

    For what one long call, such as writing it, would take too long. Looks no further than it must.
    """
    length = 0
    for size in _lengths(value):
        length += size
        if length > most:
            return True
    return False


def _lengths(value: object) -> Iterator[int]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield len(name)
            yield from _lengths(each)
    elif isinstance(value, list):
        for each in value:
            yield from _lengths(each)
    else:
        yield len(value) if isinstance(value, str) else 1


def _pieces(value: object) -> Iterator[str]:
    if _weight(value) <= PIECE:
        yield dumps(value)
    elif isinstance(value, dict):
        start = "{"
        for key, each in value.items():
            yield f"{start}{dumps(key)}: "
            yield from _pieces(each)
            start = ", "
        yield "}"
    elif isinstance(value, list | tuple):
        count = max(PIECE // _weight(value[-1]), 1)
        start = "["
        for first in range(0, len(value), count):
            yield start
            if count > 1:
                yield dumps(value[first : first + count])[1:-1]
            else:
                yield from _pieces(value[first])
            start = ", "
        yield "]"
    else:
        yield dumps(value)


def _weight(value: object) -> int:
    """About how many entries it has, at all depths: those of a list are taken to be alike."""
    if isinstance(value, dict):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value:
        return 1 + len(value) * _weight(value[-1])
    return 1
