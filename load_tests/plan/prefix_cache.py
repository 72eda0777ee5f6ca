"""The prefix cache of a simulated replica: blocks held by requests, and others by last use.

Shared prefixes are whole, or cut at their end; what else a request computed is never found again
and only takes room until it is evicted, as in a server.
"""

from collections import OrderedDict


class PrefixCache:
    """Counts blocks. What nobody holds stays until it is the least recently used."""

    def __init__(self, blocks: int) -> None:
        self._free = blocks  # those that hold nothing
        self._known: dict[int, int] = {}  # prefix → its blocks in the cache
        self._held: dict[int, int] = {}  # prefix → requests that hold it
        self._idle: OrderedDict[int, int] = OrderedDict()  # prefix, or garbage below 0 → blocks
        self._idle_blocks = 0
        self._garbage = 0

    def known(self, prefix: int) -> int:
        """How many blocks of `prefix` are in the cache."""
        return self._known.get(prefix, 0)

    def take(self, prefix: int, blocks: int) -> bool:
        """Hold `prefix`, as far as it is known, and `blocks` more; False if there is no room."""
        idle = self._idle_blocks - self._idle.get(prefix, 0)
        if blocks > self._free + idle:
            return False
        self._idle_blocks -= self._idle.pop(prefix, 0)
        self._held[prefix] = self._held.get(prefix, 0) + 1
        while self._free < blocks:
            self._evict(blocks - self._free)
        self._free -= blocks
        return True

    def publish(self, prefix: int, blocks: int) -> int:
        """A holder has computed the first `blocks` of `prefix`; how many nobody had before.

        They are the prefix's from now on, and no longer the holder's own.
        """
        new = max(0, blocks - self.known(prefix))
        self._known[prefix] = self.known(prefix) + new
        return new

    def give_back(self, prefix: int, own: int) -> None:
        """A holder ends; `own` blocks are what it held besides the prefix."""
        if own:
            self._garbage -= 1
            self._idle[self._garbage] = own
            self._idle_blocks += own
        self._held[prefix] -= 1
        if not self._held[prefix]:
            del self._held[prefix]
            if blocks := self.known(prefix):
                self._idle[prefix] = blocks
                self._idle_blocks += blocks

    def _evict(self, wanted: int) -> None:
        """Up to `wanted` blocks of the least recently used entry, from its end."""
        entry, blocks = next(iter(self._idle.items()))
        taken = min(wanted, blocks)
        if taken == blocks:
            del self._idle[entry]
            self._known.pop(entry, None)
        else:
            self._idle[entry] = blocks - taken
            if entry in self._known:
                self._known[entry] = blocks - taken
        self._idle_blocks -= taken
        self._free += taken
