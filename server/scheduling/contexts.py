"""What each request has stored in the cache, from when it is admitted until it ends. No torch.

An encoder-decoder's request has two sequences there: what its encoder returned, and what its
decoder sees. A context that is full, of a request that asked to go on, is shortened. The first
block is kept: it holds the attention sinks, without which answers break (arXiv 2309.17453). Whole
blocks after it are dropped, oldest first, and the rest is renumbered, so a request's positions
never pass the end of the context and its memory stays constant.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Capability, Evict, Fork, NoRoom, Op, OpReport, Truncate
from ropewalk.model.config import Pooling
from ropewalk.server.errors import InvalidField, PromptTooLong, UnsupportedField
from ropewalk.server.scheduling.kept import CacheOperations, Kept, KeptSequences
from ropewalk.server.scheduling.request import (
    ContextShift,
    Limits,
    Overflow,
    Request,
    Work,
    check_length,
)

T = TypeVar("T")


class Contexts:
    """The requests' contexts of up to `max_context` tokens. `running`: those that run, by id.

    `kept` sequences give way to them.
    """

    def __init__(
        self,
        cache: CacheManager,
        operations: CacheOperations,
        limits: Limits,
        running: Mapping[str, Request],
        kept: KeptSequences,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = kept
        self._cache = cache
        self._block_size = cache.block_size
        self._operations = operations
        self._max_context = limits.max_context
        self._longest = min(limits.max_context - 1, cache.capacity)  # the last token is not stored
        self._running = running
        self._clock = clock
        self._forks: list[OpReport] = []
        self._shifts: list[ContextShift] = []

    @property
    def holds_longest(self) -> bool:
        """Whether what is left of the cache holds as long a context as the whole cache did."""
        return self._cache.capacity >= self._longest

    def drain(self) -> tuple[tuple[ContextShift, ...], tuple[OpReport, ...]]:
        """Contexts that were shortened, and forks, since the last call."""
        shifts, self._shifts = tuple(self._shifts), []
        forks, self._forks = tuple(self._forks), []
        return shifts, forks

    def require_possible(self, request: Request) -> None:
        """Raises InvalidField or a subclass for one that can never be stored, or not as asked."""
        begins = request.origin.tokens if request.appends and request.origin else ()
        if len(request.tokens) <= len(begins):
            raise InvalidField("The prompt has no tokens; send at least one.", "prompt")
        check_length(
            len(request.tokens),
            len(request.source),
            self._max_context,
            answered=request.pooling is None,
        )
        if not self.fits(request) and request.pooling is not None:
            raise PromptTooLong(
                f"The input has {self._room_for(request)} tokens, but the cache holds "
                f"{self._cache.capacity}; shorten it.",
                "input",
            )
        if not self.fits(request):
            raise InvalidField(
                f"The prompt of {request.prompt_length} tokens and its answer need room for "
                f"{self._room_for(request)} tokens, but the cache holds {self._cache.capacity}; "
                "shorten the prompt or lower max_tokens.",
                "max_tokens",
            )
        if request.overflow is not Overflow.REFUSE:
            self._require_shortenable(request)
        if request.keep:
            answer = 0 if request.pooling is not None else request.params.max_tokens
            longest = min(request.num_prompt + answer, self._max_context)
            self._kept.require_room(longest, "max_tokens" if answer else "prompt")

    def fits(self, request: Request) -> bool:
        """Whether it could finish with the cache to itself."""
        return self._room_for(request) <= self._cache.capacity

    def _room_for(self, request: Request) -> int:
        """The most tokens it will have stored; those of an encoder rounded up to whole blocks."""
        if request.pooling is not None:
            return request.num_prompt
        longest = request.num_prompt + request.params.max_tokens
        size = self._block_size
        # The last token is never computed, so it needs no room.
        stored = min(longest, self._max_context) - 1
        return stored + -(-len(request.source) // size) * size

    def is_full(self, request: Request) -> bool:
        """Whether the next token would be computed at a position past the context."""
        return request.pooling is None and request.context_length >= self._max_context

    def open(self, request: Request) -> bool:
        """Reserve room for all its known tokens, in both encoder and decoder or in neither."""
        return self._with_room(self._open, request)

    def grow(self, request: Request) -> bool:
        """Make room for all tokens that the model sees; False, and unchanged, if there is none."""
        return self._with_room(self._grow, request)

    def _with_room(self, attempt: Callable[[Request], bool], request: Request) -> bool:
        """What is kept gives way before a request is preempted or waits."""
        while not attempt(request):
            if not self._kept.give_way():
                return False
        return True

    def _open(self, request: Request) -> bool:
        full = self.is_full(request)
        if full and request.id not in self._cache.parked:
            self._shorten_uncached(request)
            full = False
        origin = self._origin(request)
        if self._can_fork(request):
            return self._fork(request, request.sibling or "", request.num_prompt - 1)
        if origin is not None and request.appends:
            return self._append(request, origin)
        if origin is not None and request.num_prompt > 1:
            most = min(self._cache.computed(origin.id), request.num_prompt - 1)
            return self._fork(request, origin.id, most)
        reserve = self._cache.reserve
        if request.source and self._begin(reserve, request, request.encoded) is None:
            return False
        found = self._begin(reserve, request, request.id)
        if found is None:
            if request.source:
                self._cache.park(request.encoded)
            return False
        request.computed = found
        if full and not self._grow(request):
            self.park(request)
            return False
        return True

    def _grow(self, request: Request) -> bool:
        if self.is_full(request) and not self._shorten(request):
            return False
        known = _known(request)
        return self._cache.reserve(request.id, known, len(known)) is not None

    def commit(self, work: Work) -> None:
        """What the work computes is stored; its request counts it already."""
        request = work.request
        if work.encodes:  # so that its full blocks are accounted for; nobody shares them
            self._cache.commit(request.encoded, request.source, len(request.source))
        self._cache.commit(request.id, _known(request), request.computed)

    def park(self, request: Request) -> None:
        """Give up its blocks, but keep what they hold for when it is opened again."""
        request.computed = 0
        for name in _sequences(request):
            self._cache.park(name)

    def release(self, request: Request, *, forget: bool = False) -> None:
        """Give up its blocks, but not those that it has appended to.

        forget: nobody may use what it computed.
        """
        if request.appends and request.computed and not forget:
            return self._undo(request)
        for name in _sequences(request):
            self._cache.release(name, forget=forget)

    def keep(self, request: Request) -> None:
        """What it has stored stays in the cache under the id that it is to be kept under."""
        origin, altered = request.origin, request.dropped > 0
        kept = Kept(
            request.keep, request.client, request.salt, tuple(_known(request)), time.time(), altered
        )
        if origin is not None:
            created = origin.created if request.appends else kept.created
            kept = replace(kept, created=created, altered=altered or origin.altered)
        self._put_back(request, kept, self._cache.computed(request.id))

    def shorten_kept(self, request: Request) -> None:
        """Without the tokens that were generated after a stop string had ended the answer."""
        if request.answered is not None:
            extra = request.num_generated - request.answered
            self._kept.shorten(request.keep, _known(request), extra)

    def _undo(self, request: Request) -> None:
        """Without the tokens that were to be appended the sequence is kept as it was."""
        assert request.origin is not None
        length = min(len(request.origin.tokens), self._cache.computed(request.id))
        self._put_back(request, request.origin, length)

    def _put_back(self, request: Request, kept: Kept, length: int) -> None:
        """Its first `length` tokens are kept, and the room that it had for more is given up."""
        self._operations.apply(Truncate(request.id, length))
        self._kept.drop(kept.id)
        self._cache.rename(request.id, kept.id)
        self._kept.add(kept)

    def forget(self, request: Request) -> None:
        """It will not come back for what was parked."""
        for name in _sequences(request):
            self._cache.forget(name)

    def fetched(self, request: Request) -> bool:
        """Bring back what was kept of it, or what its prompt can share, a little in each step."""
        if not self._usable(request):
            self.forget(request)
        if self._can_fork(request) or self._origin(request) is not None:
            return True
        fetch = self._cache.fetch
        come = all(self._begin(fetch, request, name) for name in _sequences(request))
        return come and self._usable(request)  # one may have come in the place of another

    def _usable(self, request: Request) -> bool:
        """Whether it can go on from what is kept of it.

        Not from a part, if the rest depends on what an encoder returned or on dropped tokens.
        """
        names = [name for name in _sequences(request) if name in self._cache.parked]
        whole = (
            request.source
            or request.dropped
            or (request.origin is not None and request.origin.altered)
            or self.is_full(request)
            or request.pooling is Pooling.MEAN  # `pooled` is of all that was computed
        )
        return not whole or all(map(self._cache.intact, names))

    def _begin(self, call: Callable[..., T], request: Request, name: str) -> T:
        """The cache's `reserve` or `fetch` for one of its sequences."""
        if name == request.encoded:
            return call(name, request.source, len(request.source), share=False)
        known = _known(request)
        return call(
            name,
            known,
            min(len(known), self._max_context - (request.pooling is None)),
            salt=request.salt,
            # Nothing is shared with prompt log-probabilities or a mean, which need every row of the
            # prompt computed, or with a source: a decoder's K and V depend on its encoder's output.
            share=request.params.prompt_logprobs is None
            and request.pooling is not Pooling.MEAN
            and not request.source,
            own=request.context_prompt if request.num_generated else None,
        )

    def will_fork(self, request: Request) -> bool:
        """Whether its sibling is still computing the prompt that both share."""
        sibling = self._sibling(request)
        return sibling is not None and sibling.computed_prompt < request.num_prompt - 1

    def _can_fork(self, request: Request) -> bool:
        sibling = self._sibling(request)
        return sibling is not None and not sibling.dropped and request.num_prompt > 1

    def _sibling(self, request: Request) -> Request | None:
        """None for a request that can go on from what it had computed itself."""
        if request.num_generated or request.id in self._cache.parked:
            return None
        return self._running.get(request.sibling or "")

    def _origin(self, request: Request) -> Kept | None:
        """None likewise, and where what it would continue from is not kept any more."""
        kept = request.origin
        if kept is None or request.num_generated or request.id in self._cache.parked:
            return None
        return kept if self._kept.holds(kept) else None

    def _append(self, request: Request, origin: Kept) -> bool:
        """Go on with what is kept itself, so that none of its blocks changes hands."""
        if not self._cache.grow(origin.id, request.context_length):
            return False
        self._kept.take_up(origin, request.id)
        request.computed = self._cache.computed(request.id)
        return True

    def _fork(self, request: Request, source: str, length: int) -> bool:
        """Share what comes before the prompt's last token, which is computed for its logits."""
        known = _known(request)
        try:
            report = self._operations.apply(Fork(source, request.id, length))
        except NoRoom:
            return False
        if self._cache.reserve(request.id, known, len(known)) is None:
            self._cache.release(request.id)
            return False
        self._forks.append(report)
        request.computed = length
        return True

    def _require_shortenable(self, request: Request) -> None:
        """Raises UnsupportedField or InvalidField when the overflow it asks for is impossible."""
        wanted = request.overflow
        reason = self._operations.why_not(Op.EVICT_RENUMBER)
        if reason is not None:
            raise UnsupportedField(
                f"overflow {wanted.value} is impossible with this model's encoding, because "
                f"{reason}; leave overflow out.",
                "overflow",
            )
        rewrites = self._operations.capability(Op.EVICT_RENUMBER) is not Capability.FREE
        if wanted is Overflow.SLIDE and rewrites:
            raise UnsupportedField(
                "overflow slide would rotate every stored key again and again until rounding "
                "errors ruined them; use shift, or start the server with --encoding-option "
                "storage=block.",
                "overflow",
            )
        if self._max_context < 3 * self._block_size:
            raise InvalidField(
                f"overflow {wanted.value} needs a context of at least 3 blocks of "
                f"{self._block_size} tokens, but this server's has {self._max_context} tokens; "
                "leave it out.",
                "overflow",
            )
        if request.params.prompt_logprobs is not None:
            raise UnsupportedField(
                f"overflow {wanted.value} cannot be combined with the prompt's logprobs; leave "
                "echo or overflow out.",
                "overflow",
            )

    def _shorten(self, request: Request) -> bool:
        """Drop cached blocks and renumber the rest; False, with nothing changed, without room."""
        blocks = self._blocks_to_drop(request.computed // self._block_size - 1, request)
        began = self._clock()
        try:
            report = self._operations.apply(Evict(request.id, 1, blocks, renumber=True))
        except NoRoom:
            return False
        request.computed -= blocks * self._block_size
        self._drop(request, blocks, self._clock() - began, report)
        return True

    def _shorten_uncached(self, request: Request) -> None:
        """Drop the tokens that `_shorten` would, before any token is computed again."""
        movable = (request.context_length - 1) // self._block_size - 1
        self._drop(request, self._blocks_to_drop(movable, request), 0.0, None)

    def _blocks_to_drop(self, movable: int, request: Request) -> int:
        """How many of the `movable` full blocks after the first. A shift drops half, so that shifts
        are rare: each one rounds keys that carry their position."""
        return -(-movable // 2) if request.overflow is Overflow.SHIFT else 1

    def _drop(self, request: Request, blocks: int, seconds: float, report: OpReport | None) -> None:
        dropped = blocks * self._block_size
        request.front = self._block_size
        request.dropped += dropped
        self._shifts.append(ContextShift(request.context_length, dropped, seconds, report))


def _sequences(request: Request) -> tuple[str, ...]:
    """What it stores in the cache."""
    return (request.id, request.encoded) if request.source else (request.id,)


def _known(request: Request) -> list[int]:
    """The tokens that the model sees; the request's own list while none was dropped."""
    if not request.dropped:
        return request.tokens
    return request.context(0, request.context_length)
