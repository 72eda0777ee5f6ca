"""Which full blocks hold which prefixes of sequences. Knows tokens and ids, not the holders.

A digest only finds a candidate. A hit also requires equal tokens, an equal salt, and as parent
the very entry matched before it, so no collision can hand out another sequence's block.
"""

import hashlib
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol, TypeGuard

from ropewalk.cache.types import InvariantError

Digest = Callable[[bytes, str, bytes], bytes]  # (parent's digest, salt, packed tokens)
ROOT = b""  # parent digest of a sequence's first block


class Kept:
    """What a block holds or held. It is lost once it is neither in a block nor stored."""

    __slots__ = ("block", "slot", "stored", "wanted")

    def __init__(self, block: int) -> None:
        self.block = block  # of the cache; 0: in none
        self.slot = 0  # of the second place, perhaps only reserved; 0: none
        self.stored = False  # in its slot
        self.wanted = 0  # sequences that left it and will come back for it

    @property
    def lost(self) -> bool:
        return not self.block and not self.stored


class Entry(Kept):
    """One published block: its tokens continue those of `parent`, its predecessor."""

    __slots__ = ("children", "digest", "parent", "salt", "tokens")

    def __init__(
        self, digest: bytes, salt: str, tokens: bytes, parent: "Entry | None", block: int
    ) -> None:
        self.digest = digest
        self.salt = salt
        self.tokens = tokens
        self.parent = parent
        super().__init__(block)
        self.children: set[Entry] = set()


def sound(contents: Iterable[Kept]) -> list[Kept]:
    """Those before the first that is lost."""
    return list(takewhile(lambda kept: not kept.lost, contents))


def keyed_digest(key: bytes) -> Digest:
    """A chained digest; without `key` (at most 64 bytes) nobody can construct collisions."""

    def digest(parent: bytes, salt: str, tokens: bytes) -> bytes:
        state = hashlib.blake2b(key=key, digest_size=16)
        for part in (parent, salt.encode(), tokens):
            # With length prefixes, no two different triples feed the hash the same bytes.
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    return digest


class Observer(Protocol):
    """Is told what the index finds, on the thread that changes it, so it must not take long."""

    def stored(self, entry: Entry) -> None:
        """It is published from now on, as its parent is."""
        ...

    def removed(self, entries: Sequence[Entry]) -> None:
        """They are withdrawn, parents before children."""
        ...


class PrefixIndex:
    """Published blocks by digest and by id. Every entry's ancestors are published too.

    An entry whose content is only in a second place has no block, and is found all the same.
    """

    def __init__(
        self, block_size: int, digest: Digest | None = None, observer: Observer | None = None
    ) -> None:
        self._block_size = block_size
        self._observer = observer
        self._digest = digest or keyed_digest(secrets.token_bytes(32))
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}  # those in the cache

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._by_block)

    def entry(self, block: int) -> Entry | None:
        """The entry under which `block` is published."""
        return self._by_block.get(block)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._by_digest.values())

    def current(self, entry: Kept) -> TypeGuard[Entry]:
        """Whether `entry` is still published."""
        return isinstance(entry, Entry) and self._by_digest.get(entry.digest) is entry

    def leave(self, entry: Entry) -> None:
        """Its block is about to hold something else; it stays published."""
        del self._by_block[entry.block]
        entry.block = 0

    def enter(self, entry: Entry, block: int) -> None:
        """Its content is in the cache again, in `block`."""
        entry.block = block
        self._by_block[block] = entry

    def match(self, salt: str, tokens: Sequence[int], limit: int) -> list[Entry]:
        """Entries of the longest published prefix of `tokens`, at most `limit` blocks."""
        found: list[Entry] = []
        parent: Entry | None = None
        for index in range(limit):
            packed = self._pack(tokens, index)
            entry = self._by_digest.get(self._chain(parent, salt, packed))
            if entry is None or not _same(entry, salt, packed, parent):
                break
            found.append(entry)
            parent = entry
        return found

    def publish(
        self, block: int, tokens: Sequence[int], index: int, salt: str, parent: Entry | None
    ) -> Entry | None:
        """Publish `block` as the index-th block of `tokens`, after `parent`.

        Returns the entry that now represents these tokens: an earlier block's if they were already
        published, or None if another entry with the same digest occupies the place.
        """
        packed = self._pack(tokens, index)
        digest = self._chain(parent, salt, packed)
        entry = self._by_digest.get(digest)
        if entry is not None:
            return entry if _same(entry, salt, packed, parent) else None
        if block in self._by_block:
            raise InvariantError(f"block {block} is published twice")
        entry = Entry(digest, salt, packed, parent, block)
        self._by_digest[digest] = self._by_block[block] = entry
        if parent is not None:
            parent.children.add(entry)
        if self._observer is not None:
            self._observer.stored(entry)
        return entry

    def withdraw(self, entry: Entry) -> list[Entry]:
        """Withdraw a published entry and all that continue it, which nobody can reach without it.

        Returns them.
        """
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        doomed = [entry]
        for each in doomed:
            doomed.extend(each.children)
            each.children = set()
            del self._by_digest[each.digest]
            self._by_block.pop(each.block, None)
        if self._observer is not None:
            self._observer.removed(doomed)
        return doomed

    def check(self) -> None:
        """Raises InvariantError unless both maps agree and every parent is published."""
        if sum(entry.block > 0 for entry in self._by_digest.values()) != len(self._by_block):
            raise InvariantError("digests and blocks of the prefix index differ in number")
        for block, entry in self._by_block.items():
            if entry.block != block or self._by_digest.get(entry.digest) is not entry:
                raise InvariantError(f"block {block} and its prefix entry disagree")
        for entry in self._by_digest.values():
            block = entry.block
            if len(entry.tokens) != 8 * self._block_size:
                raise InvariantError(f"block {block} was published before it was full")
            if entry.lost:
                raise InvariantError("a published prefix is lost")
            parent = entry.parent
            if parent is None:
                continue
            if not self.current(parent) or entry not in parent.children:
                raise InvariantError(f"block {block} continues a withdrawn block")
            if parent.salt != entry.salt:
                raise InvariantError(f"block {block} continues a block of another salt")

    def _pack(self, tokens: Sequence[int], index: int) -> bytes:
        start = index * self._block_size
        return array("q", tokens[start : start + self._block_size]).tobytes()

    def _chain(self, parent: Entry | None, salt: str, packed: bytes) -> bytes:
        return self._digest(ROOT if parent is None else parent.digest, salt, packed)


def _same(entry: Entry, salt: str, packed: bytes, parent: Entry | None) -> bool:
    return entry.parent is parent and entry.tokens == packed and entry.salt == salt
