"""Sequences that stay in the cache when the request that computed them has ended. No torch.

They are few and expire, and the least recently used ones give way before a request is preempted or
waits for blocks. Operations change them; completions continue from copies that share their blocks.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, KeysView, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import (
    Capability,
    Evict,
    Fork,
    Move,
    NoRoom,
    Op,
    Operation,
    OpReport,
    Truncate,
    Unsupported,
)
from ropewalk.server.errors import (
    ImpossibleOperation,
    InvalidField,
    PromptTooLong,
    QueueFull,
    SequenceBusy,
    SequenceNotFound,
)

MOST = 16  # of one model
SHARE = 4  # of the cache's blocks, one in so many may be theirs
EXPIRES_S = 300.0  # after the last use

NOT_KEPT = (
    "no sequence is kept under this id; it may have expired or made room for requests, so keep its "
    "prompt again with POST /v1/cache/sequences"
)


class CacheOperations(Protocol):
    """What the scheduler asks of cache/operations.py, which it must not import."""

    def capability(self, op: Op) -> Capability: ...

    def why_not(self, op: Op) -> str | None: ...

    def dry_run(self, operation: Operation) -> OpReport: ...

    def apply(self, operation: Operation) -> OpReport: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A sequence that is kept; `id` is also its name in the cache. Operations make a new one.

    Of its tokens all are stored, or all but the last ones of an answer. `altered`: entries were
    computed among others than these, so that computing them again would give others.
    """

    id: str
    client: str  # nobody else may use it
    salt: str  # of its prefixes
    tokens: tuple[int, ...]
    created: float  # unix seconds
    altered: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation on a kept sequence, in tokens: multiples of a block's, where it moves blocks.

    A fork shares, and a truncation keeps, the first `count`. `onto`: where a span is moved.
    """

    op: Op
    first: int = 0
    count: int = 0
    onto: str = ""


@dataclass(frozen=True, slots=True)
class Happened:
    """`after`: the sequence that the operation has made or changed."""

    after: Kept
    predicted: OpReport
    report: OpReport


def new_id() -> str:
    return f"seq-{uuid.uuid4().hex}"


class KeptSequences:
    """Of one model's cache. Touched by the engine's thread only."""

    def __init__(
        self,
        cache: CacheManager,
        operations: CacheOperations,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._operations = operations
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # least recently used first
        self._used: dict[str, float] = {}  # when, by id
        self._claimed: set[str] = set()  # ids of those that a request appends to

    @property
    def ids(self) -> KeysView[str]:
        """Names of their sequences in the cache."""
        return self._kept.keys()

    @property
    def most_tokens(self) -> int:
        """That one of them may have, and nearly what all of them may."""
        return self._cache.capacity // self._cache.block_size // SHARE * self._cache.block_size

    def all(self) -> list[Kept]:
        """Least recently used first."""
        self._expire()
        return [*self._kept.values()]

    def get(self, id_: str, client: str) -> Kept:
        """Raises SequenceNotFound and SequenceBusy. Asking for it is using it."""
        self._expire()
        kept = self._kept.get(id_)
        self.require_unclaimed(id_)
        if kept is None or kept.client != client:
            raise SequenceNotFound(NOT_KEPT)
        self._use(kept)
        return kept

    def to_continue(self, id_: str, client: str) -> Kept:
        """As `get`. Raises ImpossibleOperation if no token can come after its last one."""
        kept = self.get(id_, client)
        bases, size = self._cache.table(id_).bases, self._cache.block_size
        if bases[-1] != (len(bases) - 1) * size:
            raise ImpossibleOperation(
                "evict_keep has left a gap in the positions of this sequence, which cannot be "
                "continued; use evict_renumber on another one"
            )
        return kept

    def expires_in(self, kept: Kept) -> float:
        """Seconds, unless it is used or gives way before."""
        return self._used[kept.id] + EXPIRES_S - self._clock()

    def holds(self, kept: Kept) -> bool:
        """Whether it is still kept, and still as it was."""
        return self._kept.get(kept.id) is kept

    def require_room(self, tokens: int, param: str) -> None:
        """Raises PromptTooLong for more than are kept."""
        if tokens > self.most_tokens:
            raise PromptTooLong(
                f"a sequence of {tokens} tokens is too long to be kept, as kept ones may have "
                f"1/{SHARE} of the cache, {self.most_tokens} tokens; shorten it",
                param,
            )

    def require_unclaimed(self, id_: str) -> None:
        """Raises SequenceBusy."""
        if id_ in self._claimed:
            raise SequenceBusy("a request is appending to this sequence; send this one afterwards")

    def require_appendable(self, id_: str, origin: Kept | None) -> None:
        """Raises SequenceBusy, also if it is not `origin` any more: that would be written over."""
        self.require_unclaimed(id_)
        if self._kept.get(id_) is not origin:
            raise SequenceBusy(
                "another request has changed or freed this sequence since this one looked at it; "
                "look at it again before you append"
            )

    def claim(self, id_: str) -> None:
        """A request is about to append to it."""
        self._claimed.add(id_)

    def unclaim(self, id_: str) -> None:
        """That request has ended."""
        self._claimed.discard(id_)

    def add(self, kept: Kept) -> None:
        """Keep what the cache holds under its id. Others make room if there are too many."""
        self._kept[kept.id] = kept
        self._use(kept)
        while len(self._kept) > MOST or self._blocks() > self.most_tokens // self._cache.block_size:
            if not self.give_way({kept.id}):
                break

    def shorten(self, id_: str, tokens: Sequence[int], by: int) -> None:
        """Give up the last of these tokens, unless the sequence has changed since it had them."""
        kept = self._kept.get(id_)
        if kept is None or by <= 0 or id_ in self._claimed or kept.tokens != tuple(tokens):
            return
        length = len(tokens) - by
        # The last token is not stored, as in any other: what follows it is computed with it.
        self._operations.apply(Truncate(id_, min(length - 1, self._cache.computed(id_))))
        self.add(replace(kept, tokens=kept.tokens[:length]))

    def take_up(self, kept: Kept, name: str) -> None:
        """The cache holds it under that name, and it is kept no more."""
        self._remove(kept.id)
        self._cache.rename(kept.id, name)

    def drop(self, id_: str, *, forget: bool = False) -> bool:
        """Give up its blocks; returns whether it was kept. `forget`: nobody may use them."""
        if id_ not in self._kept:
            return False
        self._remove(id_)
        self._cache.release(id_, forget=forget)
        return True

    def give_way(self, but: Collection[str] = ()) -> bool:
        """Drop the one used least recently; False if there is none, except `but`."""
        oldest = next((id_ for id_ in self._kept if id_ not in but), None)
        return oldest is not None and self.drop(oldest)

    def _expire(self) -> None:
        """Drop those that were not used for long: seen to when one looks, as they give way anyway
        to whoever needs their blocks."""
        while self._kept and self.expires_in(next(iter(self._kept.values()))) <= 0:
            self.give_way()

    def apply(self, kept: Kept, asked: Asked) -> Happened:
        """Do it. Raises ImpossibleOperation with the reason, QueueFull and InvalidField."""
        onto = self.get(asked.onto, kept.client) if asked.op is Op.MOVE_SPAN else kept
        operation, after = self._operation(kept, asked, onto)
        drops = asked.op in (Op.EVICT_KEEP, Op.EVICT_RENUMBER)
        if drops and asked.count >= self._cache.computed(kept.id):
            raise InvalidField("nothing stored would be left; leave at least one token", "count")
        self.require_room(len(after.tokens), "count")
        try:
            predicted = self._operations.dry_run(operation)
            report = self._with_room(operation, {kept.id, onto.id})
        except Unsupported as error:
            raise ImpossibleOperation(str(error)) from None
        except ValueError as error:
            raise InvalidField(f"{error}; send another span", "count") from None
        self.add(after)
        return Happened(after, predicted, report)

    def _operation(self, kept: Kept, asked: Asked, onto: Kept) -> tuple[Operation, Kept]:
        """The cache's, and what it leaves."""
        size, tokens = self._cache.block_size, kept.tokens
        first, count, end = asked.first // size, asked.count // size, asked.first + asked.count
        if asked.op is Op.FORK:
            child = replace(kept, id=new_id(), tokens=tokens[: asked.count], created=time.time())
            return Fork(kept.id, child.id, asked.count), child
        if asked.op is Op.TRUNCATE:
            return Truncate(kept.id, asked.count), replace(kept, tokens=tokens[: asked.count])
        if asked.op is Op.MOVE_SPAN:
            stored = onto.tokens[: self._cache.computed(onto.id)]
            longer = replace(onto, tokens=stored + tokens[asked.first : end], altered=True)
            return Move(kept.id, first, count, onto.id), longer
        shorter = replace(kept, tokens=tokens[: asked.first] + tokens[end:], altered=True)
        return Evict(kept.id, first, count, renumber=asked.op is Op.EVICT_RENUMBER), shorter

    def _with_room(self, operation: Operation, involved: Collection[str]) -> OpReport:
        while True:
            try:
                return self._operations.apply(operation)
            except NoRoom:
                if not self.give_way(involved):
                    raise QueueFull(
                        "requests need the blocks that this operation would copy to; send it again "
                        "later"
                    ) from None

    def _use(self, kept: Kept) -> None:
        self._kept.move_to_end(kept.id)
        self._used[kept.id] = self._clock()

    def _remove(self, id_: str) -> None:
        del self._kept[id_], self._used[id_]

    def _blocks(self) -> int:
        return len({block for id_ in self._kept for block in self._cache.table(id_).blocks})
