"""Which replica gets a request. Policies for predictions and measurements, not for production.

A policy sees what a router sees: how many requests it has sent to each replica that are not
answered yet, and what it sent where before.
"""

import hashlib
import random
from bisect import bisect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from itertools import cycle

import numpy as np
import numpy.typing as npt

from ropewalk.load_tests.plan.traffic import Call

Loads = npt.NDArray[np.int64]  # requests in flight, by replica
_POINTS = 64  # on the ring, of each replica


Policy = Callable[[Call, Loads], int]  # the number of the replica that gets a call


def round_robin(replicas: int) -> Policy:
    """One after the other."""
    turns = cycle(range(replicas))
    return lambda call, loads: next(turns)


def least_loaded() -> Policy:
    """One with the fewest requests in flight, by lot."""
    lot = random.Random(0)
    return lambda call, loads: int(lot.choice(np.flatnonzero(loads == loads.min())))


def consistent_hash(replicas: int) -> Policy:
    """The one whose point on a ring follows the prefix's: always the same, whatever its load."""
    points = sorted(
        (_place(f"replica {replica}, {point}"), replica)
        for replica in range(replicas)
        for point in range(_POINTS)
    )
    places = [place for place, _ in points]

    def pick(call: Call, loads: Loads) -> int:
        _, replica = points[bisect(places, _place(f"prefix {call.prefix}")) % len(points)]
        return replica

    return pick


def weighed(replicas: int, slack: int, kept: int) -> Policy:
    """One that knows the prefix, unless it has more than `slack` requests above the least loaded.

    Each replica is taken to know the last `kept` prefixes that it was sent.
    """
    known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
    holders: defaultdict[int, set[int]] = defaultdict(set)
    least = least_loaded()

    def pick(call: Call, loads: Loads) -> int:
        best = min(
            holders[call.prefix], key=lambda replica: (loads[replica], replica), default=None
        )
        if best is None or loads[best] > loads.min() + slack:
            best = least(call, loads)
        known[best][call.prefix] = None
        known[best].move_to_end(call.prefix)
        holders[call.prefix].add(best)
        if len(known[best]) > kept:
            forgotten, _ = known[best].popitem(last=False)
            holders[forgotten].discard(best)
        return best

    return pick


def policies(replicas: int, slack: int, kept: int) -> Mapping[str, Policy]:
    """All policies by name, for one run: they remember. Arguments as in `weighed`."""
    return {
        "round robin": round_robin(replicas),
        "least loaded": least_loaded(),
        "consistent hash": consistent_hash(replicas),
        "prefix and load": weighed(replicas, slack, kept),
    }


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
