"""What happens when a request's context is full and it asked to go on. No torch.

The first block is kept: it holds the attention sinks, without which answers break (arXiv
2309.17453). Whole blocks after it are dropped, oldest first, and the rest is renumbered, so a
request's positions never pass the end of the context and its memory stays constant.
"""

import time
from collections.abc import Callable
from typing import Protocol

from ropewalk.cache.types import Capability, Evict, NoRoom, Op, Operation, OpReport
from ropewalk.server.errors import InvalidField, UnsupportedField
from ropewalk.server.scheduling.request import ContextShift, Overflow, Request


class CacheOperations(Protocol):
    """What the scheduler asks of cache/operations.py, which it must not import."""

    def capability(self, op: Op) -> Capability: ...

    def why_not(self, op: Op) -> str | None: ...

    def apply(self, operation: Operation) -> OpReport: ...


class ContextShifter:
    """Shortens full contexts of `max_context` tokens in blocks of `block_size`."""

    def __init__(
        self,
        operations: CacheOperations,
        block_size: int,
        max_context: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operations = operations
        self._block_size = block_size
        self._max_context = max_context
        self._clock = clock

    def require_possible(self, request: Request) -> None:
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
                "frame=block.",
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

    def shorten(self, request: Request) -> ContextShift | None:
        """Drop cached blocks and renumber the rest; None, with nothing changed, without room."""
        blocks = self._blocks_to_drop(request.computed // self._block_size - 1, request)
        began = self._clock()
        try:
            report = self._operations.apply(Evict(request.id, 1, blocks, renumber=True))
        except NoRoom:
            return None
        request.computed -= blocks * self._block_size
        return self._forget(request, blocks, self._clock() - began, report)

    def shorten_uncached(self, request: Request) -> ContextShift:
        """Drop the tokens that `shorten` would, before any token is computed again."""
        movable = (request.context_length - 1) // self._block_size - 1
        return self._forget(request, self._blocks_to_drop(movable, request), 0.0, None)

    def _blocks_to_drop(self, movable: int, request: Request) -> int:
        """How many of the `movable` full blocks after the first. A shift drops half, so that shifts
        are rare: each one rounds keys that carry their position."""
        return -(-movable // 2) if request.overflow is Overflow.SHIFT else 1

    def _forget(
        self, request: Request, blocks: int, seconds: float, report: OpReport | None
    ) -> ContextShift:
        dropped = blocks * self._block_size
        request.front = self._block_size
        request.dropped += dropped
        return ContextShift(request.context_length, dropped, seconds, report)
