"""How much work positions cost in a step: analytic, from how many tokens had how much context.

An encoding says what one token costs at a context of n keys. A chunk of a prompt has many such
contexts, so the costs are summed once up to each n, and a chunk is the difference of two sums.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import add, sub

from model.positional_work import NO_WORK, PositionalWork
from server.plan import Work

Cost = Callable[[int], PositionalWork]  # of one token that sees so many keys
Sum = tuple[int, ...]  # the values of PositionalWork

_TOGETHER = 64  # contexts that are added up at once: for every step anew it takes far longer


def no_cost(context: int) -> PositionalWork:
    """Where there is no encoding, or none that is known."""
    return NO_WORK


class PositionMeter:
    """`cost` is of a token of the decoder; `source_cost` of one that an encoder reads.

    `trained_context` None: nothing is past it.
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
        self._sums = [NO_WORK.values]  # of contexts 1 to the index

    def measure(self, plan: Sequence[Work]) -> tuple[PositionalWork, PositionalWork]:
        """Prefill and decode. To be asked before the plan is recorded.

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
        """How many of these requests' newest tokens stand at positions training never had."""
        if self._trained_context is None:
            return 0
        return sum(work.request.context_length > self._trained_context for work in recorded)

    def _upto(self, context: int) -> Sum:
        """Of tokens that see 1, 2, ... `context` keys."""
        if len(self._sums) <= context:
            while len(self._sums) < context + _TOGETHER:
                cost = self._cost(len(self._sums)).values
                self._sums.append(tuple(map(add, self._sums[-1], cost)))
        return self._sums[context]
