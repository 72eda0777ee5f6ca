"""A line on standard error when something takes longer than a person waits without a word."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def said_if_long(text: str, seconds: float = 2.0) -> Iterator[None]:
    """Prints `text ...` after that many seconds, unless the block is done by then."""
    timer = threading.Timer(seconds, lambda: print(f"{text} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
