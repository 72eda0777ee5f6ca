"""How much work positions cost in a step: analytic, from how many tokens had how much context.

An encoding says what one token costs at a context of n keys. A chunk of a prompt has many such
contexts, so the costs are summed once up to each n, and a chunk is the difference of two sums.
"""

from collections.abc import Callable, Iterable
from operator import add

from model.encodings.base import PositionalWork
from server.plan import Work
from server.request import PositionTotals

Cost = Callable[[int], PositionalWork]  # of one token that sees so many keys
Sum = tuple[int, ...]  # the values of PositionTotals


def no_cost(context: int) -> PositionalWork:
    """Where there is no encoding, or none that is known."""
    return PositionalWork()


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
        self._sums = [PositionTotals().values]  # of contexts 1 to the index

    def measure(self, plan: Iterable[Work]) -> tuple[PositionTotals, PositionTotals]:
        """Prefill and decode. To be asked before the plan is recorded.

        Prefill is all that is computed for a request before its first token; computing it again
        after a preemption later counts as decode.
        """
        before: tuple[list[Sum], list[Sum]] = ([], [])
        after: tuple[list[Sum], list[Sum]] = ([], [])
        sources = [PositionTotals(), PositionTotals()]
        for work in plan:
            phase = work.decodes
            before[phase].append(self._upto(work.start))
            after[phase].append(self._upto(work.start + work.count))
            if work.encodes:
                length = len(work.request.source)
                # Each of its tokens sees all of them.
                sources[phase] += _totals(self._source_cost(length)) * length
        prefill, decode = (
            _added(after[phase]) - _added(before[phase]) + sources[phase] for phase in (0, 1)
        )
        return prefill, decode

    def extrapolated(self, recorded: Iterable[Work]) -> int:
        """How many of these requests' newest tokens stand at positions training never had."""
        if self._trained_context is None:
            return 0
        return sum(work.request.context_length > self._trained_context for work in recorded)

    def _upto(self, context: int) -> Sum:
        """Of tokens that see 1, 2, ... `context` keys."""
        while len(self._sums) <= context:
            cost = _totals(self._cost(len(self._sums))).values
            self._sums.append(tuple(map(add, self._sums[-1], cost)))
        return self._sums[context]


def _added(sums: Iterable[Sum]) -> PositionTotals:
    """All at once: a step has as many as requests."""
    return PositionTotals(*map(sum, zip(*sums, strict=True)))


def _totals(work: PositionalWork) -> PositionTotals:
    return PositionTotals(
        rotations=work.rotations,
        bias_values=work.bias_values,
        bias_built=work.bias_built,
        flops=work.flops,
        bytes=work.bytes,
        bias_bytes=work.bias_bytes,
    )
