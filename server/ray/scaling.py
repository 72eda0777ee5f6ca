"""How many replicas Ray should run, by what their engines have to do. No torch."""

from math import ceil
from typing import Any

SEQUENCES = "sequences"  # the metric of a replica: those that run or wait in its engine


class BySequences:
    """So many replicas that each has at most `most` sequences to run or to keep waiting.

    Ray calls it with its context, every second or so, and applies its own bounds and delays.
    """

    def __init__(self, most: float = 32) -> None:
        self._most = most

    def __call__(self, context: Any) -> tuple[int, dict[str, object]]:
        found = (context.aggregated_metrics or {}).get(SEQUENCES, {})
        if not found:  # no replica has told anything yet
            return context.target_num_replicas, {}
        return ceil(sum(found.values()) / self._most), {}
