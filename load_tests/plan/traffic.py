"""What is asked of replicas: prompts that begin with one of many shared prefixes.

A trace is the same for the simulation and for real servers, request by request.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ropewalk.load_tests.common.types import Profile, Request
from ropewalk.load_tests.workload.prompts import PromptMaker


@dataclass(frozen=True, slots=True)
class Call:
    """One request: `prefix` names the shared beginning of its prompt. Lengths are in tokens."""

    prefix: int
    prefix_tokens: int
    tail_tokens: int  # of the prompt, after the prefix: nobody else's
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.tail_tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one replica's share of the clients asks for; N replicas have N times the clients.

    The popularity of prefixes falls with their rank to the power of `skew`: 0 is even, 1 is Zipf's
    law. Tails and answers are between half and one and a half times as long as said.
    """

    prefixes: int = 25  # for each replica
    skew: float = 0.0
    prefix_tokens: int = 200
    tail_tokens: int = 16
    output_tokens: int = 16
    concurrency: int = 4  # requests always in flight, for each replica
    rate: float = 0.0  # or, above 0, requests per second for each replica, at random moments

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.tail_tokens

    def profile(self, replicas: int) -> Profile:
        if self.rate:
            return Profile("poisson", rate=self.rate * replicas)
        return Profile("closed", concurrency=self.concurrency * replicas)

    def trace(self, replicas: int, count: int, seed: str) -> list[Call]:
        """`count` calls of the clients of all replicas."""
        source = random.Random(seed)
        ranks = range(self.prefixes * replicas)
        shares = list(accumulate((rank + 1) ** -self.skew for rank in ranks))
        return [
            Call(
                prefix,
                self.prefix_tokens,
                _about(self.tail_tokens, source),
                _about(self.output_tokens, source),
            )
            for prefix in source.choices(ranks, cum_weights=shares, k=count)
        ]


def requests_of(trace: Sequence[Call], seed: str, vocab_size: int) -> list[Request]:
    """Prompts for a trace, in token ids."""
    maker = PromptMaker(seed, "ids", vocab_size)
    lengths = {call.prefix: call.prefix_tokens for call in trace}
    prefixes = {prefix: maker.pieces(length) for prefix, length in sorted(lengths.items())}
    return [
        Request(
            maker.prompt(call.prompt_tokens, prefixes[call.prefix]),
            call.prompt_tokens,
            call.output_tokens,
        )
        for call in trace
    ]


def _about(tokens: int, source: random.Random) -> int:
    return max(1, source.randint(tokens - tokens // 2, tokens + tokens // 2))
