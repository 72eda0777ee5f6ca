"""The work that positions cost in a step, calculated from the context length of each token.

An encoding gives the cost of one token that sees n keys. A chunk of a prompt covers a range of n,
so prefix sums of the costs are kept, and a chunk's cost is the difference of two of them.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import add, sub

from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork
from ropewalk.server.scheduling.plan import Work

Cost = Callable[[int], PositionalWork]  # of one token that sees so many keys
Sum = tuple[int, ...]  # the values of PositionalWork

_TOGETHER = 64  # sums to add at a time: adding them step by step takes far longer


def no_cost(context: int) -> PositionalWork:
    """Where there is no encoding, or none that is known."""
    return NO_WORK


class PositionMeter:
    """`cost` is that of a decoder's token, `source_cost` that of an encoder's.

    With `trained_context` None no token counts as extrapolated.
    """

    def __init__(
        self,
        cost: Cost = no_cost,
        source_cost: Cost = no_cost,
        trained_context: int | None = None,
    ) -> None:
        self._cost = cost
        self._source_cost = source_cost
        self._trained_context = trained_context
        self._sums = [NO_WORK.values]  # [n]: of contexts 1 to n

    def measure(self, plan: Sequence[Work]) -> tuple[PositionalWork, PositionalWork]:
        """The work of prefill and of decode. Call before the plan is recorded.

        Prefill is all that is computed for a request before its first token; computing it again
        after a preemption later counts as decode.
        """
        spent = [NO_WORK, NO_WORK]
        for phase in (False, True):
            own = [work for work in plan if work.decodes is phase]
            if own:
                spent[phase] = self._spent(own)
        prefill, decode = spent
        return prefill, decode

    def _spent(self, plan: Sequence[Work]) -> PositionalWork:
        before = map(sum, zip(*(self._upto(work.start) for work in plan), strict=True))
        after = map(sum, zip(*(self._upto(work.start + work.count) for work in plan), strict=True))
        spent = PositionalWork(*map(sub, after, before))
        for work in plan:
            if work.encodes:
                length = len(work.request.source)
                # Each of its tokens sees all of them.
                spent += self._source_cost(length) * length
        return spent

    def extrapolated(self, recorded: Iterable[Work]) -> int:
        """How many of these requests have their newest token past the trained context."""
        if self._trained_context is None:
            return 0
        return sum(work.request.context_length > self._trained_context for work in recorded)

    def _upto(self, context: int) -> Sum:
        """The summed cost of tokens that see 1, 2, ... `context` keys."""
        if len(self._sums) <= context:
            while len(self._sums) < context + _TOGETHER:
                cost = self._cost(len(self._sums)).values
                self._sums.append(tuple(map(add, self._sums[-1], cost)))
        return self._sums[context]
