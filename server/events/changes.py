"""What changed in a prefix index since it was last told of.

The engine's thread notes changes, another thread takes them. Only the difference is kept: what was
published and withdrawn meanwhile is no change. So this never holds more than the cache did and
does, however long nobody takes it, and the engine waits for nothing but the other thread's taking.
"""

import os
from collections.abc import Sequence
from threading import Lock

from ropewalk.cache.prefix import Entry


class Changes:
    """The observer of one cache's prefix index.

    `signal` is a file descriptor that is readable when there may be changes to take.
    """

    def __init__(self) -> None:
        self.signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._stored: dict[Entry, None] = {}
        self._removed: list[Entry] = []

    def stored(self, entry: Entry) -> None:
        with self._lock:
            first = not (self._stored or self._removed)
            self._stored[entry] = None
        if first:
            os.eventfd_write(self.signal, 1)

    def removed(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            first = not (self._stored or self._removed)
            for entry in entries:
                if entry in self._stored:
                    del self._stored[entry]
                else:
                    self._removed.append(entry)
        if first:
            os.eventfd_write(self.signal, 1)

    def take(self) -> tuple[list[Entry], list[Entry]]:
        """Entries withdrawn and entries published since the last call, the latter in order.

        What was withdrawn comes first: the same tokens may have been published again since.
        """
        with self._lock:
            removed, self._removed = self._removed, []
            stored, self._stored = self._stored, {}
        return removed, list(stored)
