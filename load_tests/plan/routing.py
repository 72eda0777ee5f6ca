"""Which replica gets a request. Policies for predictions and measurements, not for production.

A policy sees what a router sees: how many requests it has sent to each replica that are not
answered yet, and what it sent where before.
"""

import hashlib
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ropewalk.load_tests.plan.traffic import Call

Loads = npt.NDArray[np.int64]  # requests in flight, by replica
_POINTS = 64  # on the ring, of each replica


class Policy(Protocol):
    def pick(self, call: Call, loads: Loads) -> int:
        """The number of the replica that gets `call`."""


class RoundRobin:
    """One after the other."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._sent = 0

    def pick(self, call: Call, loads: Loads) -> int:
        self._sent += 1
        return (self._sent - 1) % self._replicas


class LeastLoaded:
    """One with the fewest requests in flight, by lot."""

    def __init__(self) -> None:
        self._lot = random.Random(0)

    def pick(self, call: Call, loads: Loads) -> int:
        return int(self._lot.choice(np.flatnonzero(loads == loads.min())))


class ConsistentHash:
    """The one whose point on a ring follows the prefix's: always the same, whatever its load."""

    def __init__(self, replicas: int) -> None:
        points = sorted(
            (_place(f"replica {replica}, {point}"), replica)
            for replica in range(replicas)
            for point in range(_POINTS)
        )
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def pick(self, call: Call, loads: Loads) -> int:
        at = bisect(self._places, _place(f"prefix {call.prefix}"))
        return self._replicas[at % len(self._replicas)]


class Weighed:
    """One that knows the prefix, unless it has more than `slack` requests above the least loaded.

    Each replica is taken to know the last `kept` prefixes that it was sent.
    """

    def __init__(self, replicas: int, slack: int, kept: int) -> None:
        self._slack = slack
        self._kept = kept
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self._holders: dict[int, set[int]] = {}
        self._least = LeastLoaded()

    def pick(self, call: Call, loads: Loads) -> int:
        holders = self._holders.setdefault(call.prefix, set())
        best = min(holders, key=lambda replica: (loads[replica], replica), default=None)
        if best is None or loads[best] > loads.min() + self._slack:
            best = self._least.pick(call, loads)
        known = self._known[best]
        known[call.prefix] = None
        known.move_to_end(call.prefix)
        holders.add(best)
        if len(known) > self._kept:
            forgotten, _ = known.popitem(last=False)
            self._holders[forgotten].discard(best)
        return best


def policies(replicas: int, slack: int, kept: int) -> Mapping[str, Policy]:
    """All policies by name, for one run: they remember. Arguments as in `Weighed`."""
    return {
        "round robin": RoundRobin(replicas),
        "least loaded": LeastLoaded(),
        "consistent hash": ConsistentHash(replicas),
        "prefix and load": Weighed(replicas, slack, kept),
    }


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
