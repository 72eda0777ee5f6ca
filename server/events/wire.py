"""Events as vLLM's consumers read them: what each holds, without how it is sent.

A batch is [seconds since the epoch, events, rank]; an event is a map with a "type". A block's hash
is that of all tokens up to its end, and of the salt: the prefix index's own digest, but without
its secret key, so that it is the same in every process. Its first 64 bits are published.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ropewalk.cache.prefix import ROOT, Entry, keyed_digest

Event = dict[str, Any]
# Where consumers take a block to be reusable at once; one in the second place nearly is.
MEDIUM = "GPU"
CLEARED: Event = {"type": "AllBlocksCleared"}
_digest = keyed_digest(b"")


class Told:
    """What consumers know, if they got every event: the published entries, with their hashes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._digests: dict[Entry, bytes] = {}  # parents before children

    def update(self, removed: Sequence[Entry], stored: Sequence[Entry]) -> list[Event]:
        """The events of a change: what is removed, then what is stored."""
        gone = [_number(self._digests.pop(entry)) for entry in removed]
        events: list[Event] = []
        if gone and not self._digests:
            events = [CLEARED]
        elif gone:
            events = [{"type": "BlockRemoved", "block_hashes": gone, "medium": MEDIUM}]
        for entry in stored:
            parent = ROOT if entry.parent is None else self._digests[entry.parent]
            self._digests[entry] = _digest(parent, entry.salt, entry.tokens)
        return events + [self._stored(run) for run in _runs(stored)]

    def everything(self) -> list[Event]:
        """The events that tell all of it to somebody who may know anything else."""
        return [CLEARED, *(self._stored(run) for run in _runs(self._digests))]

    def _stored(self, run: Sequence[Entry]) -> Event:
        first = run[0]
        tokens = array("q", b"".join(entry.tokens for entry in run))
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [_number(self._digests[entry]) for entry in run],
            "parent_block_hash": (
                None if first.parent is None else _number(self._digests[first.parent])
            ),
            "token_ids": tokens.tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        if first.salt and first.parent is None:
            event["extra_keys"] = [[first.salt], *[None] * (len(run) - 1)]
        return event


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Consecutive entries that continue each other."""
    run: list[Entry] = []
    for entry in entries:
        if run and entry.parent is not run[-1]:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
