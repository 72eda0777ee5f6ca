"""Follows an answer through its grammar, token by token, on the engine's thread.

A matcher's state is a function of the tokens that it was told, and the scheduler tells it each of
them once: preemption, a shortened context and steps computed again change nothing about it.
"""

from collections.abc import Collection, Mapping
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

from ropewalk.model.sampling import SamplingParams, allows
from ropewalk.server.errors import FormFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher

# What llguidance may spend: on a grammar, and on a single mask. Less than its own limits, so that a
# grammar made to be slow holds up a step by some milliseconds and then fails.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
}
SLOW = 0.004  # seconds of the processor for one token; far more than honest grammars need
PATIENCE = 0.04  # seconds beyond that, over a whole answer


NOWHERE = (
    "no token of this model continues the answer in the form that it must have, or finding one "
    "takes too long; simplify that form"
)


class Matcher:
    """Of one answer."""

    def __init__(self, state: "LLMatcher", mask: bytes, ends: frozenset[int]) -> None:
        """mask: of the first token. ends: tokens that may come where the answer is complete."""
        self.finished = False  # nothing can follow, not even a token that ends the answer
        self._state = state
        self._mask: bytes | None = mask  # of the next token, once it was needed
        self._forced = False  # the next token must be a certain one
        self._ends = ends
        self._late = 0.0

    def allowed(self, params: SamplingParams, place: int) -> "Next":
        """The tokens that may be the answer's token number `place`."""
        if place < params.min_tokens:
            return Next(self, self._ends | params.stop_ids)
        return Next(self, self._ends - params.stop_ids)

    def advance(self, token: int, most: int) -> list[int]:
        """Take the answer's next token; returns up to `most` tokens that must follow it.

        Raises FormFailed where the grammar does not have it, or following it takes too long.
        """
        began = thread_time()
        forced: list[int] = []
        must: list[int] = []
        state, new = self._state, [token]
        while new and state.consume_tokens(new):
            must = state.compute_ff_tokens()
            new = must[: most - len(forced)]
            forced += new
        if state.is_error():
            raise FormFailed(NOWHERE)
        self._mask, self._forced = None, bool(must)
        self._spend(began)
        self.finished = state.is_stopped() or (
            state.is_accepting() and not any_but(self.mask(), self._ends)
        )
        return forced

    def takes(self, token: int) -> bool:
        """Whether the token, none that ends an answer, may come next."""
        if self._forced or self._mask is not None:
            return allows(self.mask(), token)
        began = thread_time()
        try:
            return self._state.validate_tokens([token]) == 1
        except ValueError:
            return False  # nothing may; `mask` says why
        finally:
            self._spend(began)

    def mask(self) -> bytes:
        """The tokens that may come next, a bit each. Raises FormFailed where there are none."""
        if self._mask is None:
            began = thread_time()
            mask = mask_of(self._state)
            if mask is None:
                raise FormFailed(NOWHERE)
            self._spend(began)
            self._mask = mask
        return self._mask

    def _spend(self, began: float) -> None:
        self._late += max(0, thread_time() - began - SLOW)
        if self._late > PATIENCE:
            raise FormFailed(
                "the form that this answer must have takes too long to follow; simplify it"
            )


class Next(NamedTuple):
    """The tokens that may come next in an answer.

    Where it may end, but must not yet or ignores ends, it goes on if it can.
    """

    matcher: Matcher
    held: frozenset[int]  # tokens that are left out if there are others

    def includes(self, token: int) -> bool:
        if token in self.held:
            return allows(self.bits(), token)
        return self.matcher.takes(token)

    def bits(self) -> bytes:
        return without(self.matcher.mask(), self.held)


def mask_of(state: "LLMatcher") -> bytes | None:
    """The tokens that may come next; None if the grammar leads nowhere, or is too much work."""
    try:
        return state.compute_bitmask()
    except ValueError:
        return None


def any_but(mask: bytes, ends: Collection[int]) -> bool:
    """Whether the mask has a token that is no end."""
    return _cleared(mask, ends) != bytes(len(mask))


def without(mask: bytes, held: Collection[int]) -> bytes:
    """The mask without some tokens, unless it has no others."""
    left = _cleared(mask, held)
    return mask if left == bytes(len(left)) else left


def _cleared(mask: bytes, tokens: Collection[int]) -> bytes:
    """The mask without some tokens: the same object where it has none of them, as is usual."""
    present = [token for token in tokens if allows(mask, token)]
    if not present:
        return mask
    left = bytearray(mask)
    for token in present:
        left[token >> 3] &= ~(1 << (token & 7))
    return bytes(left)
