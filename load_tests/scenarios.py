"""The workloads: which requests, how many at once. Knows neither HTTP nor results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from load_tests.prompts import PromptMaker
from load_tests.terms import Request

WORKLOADS: Mapping[str, str] = {
    "stream": "one stream at a time",
    "prefill": "one long prompt, one new token",
    "closed": "a closed loop of workers, each sending its next request when the last is answered",
    "shared-prefix": "16 requests, 8 at once, one long prefix in common that is new in each run",
    "poisson": "requests at random moments, --rate per second on average",
}
SHARED_REQUESTS = 16
SHARED_CONCURRENCY = 8
SHARED_SUFFIX_TOKENS = 32
SHARED_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and counts a user may change."""

    prompt_tokens: int = 128
    output_tokens: int = 128
    prefill_tokens: int = 1024
    prefix_tokens: int = 768
    requests_per_worker: int = 2
    rate: float = 1.0  # requests per second
    arrivals: int = 32  # requests of one Poisson run


@dataclass(frozen=True, slots=True)
class Scenario:
    """One workload at one concurrency: a line of the report."""

    workload: str
    concurrency: int  # requests in flight; 0 when arrivals alone decide
    rate: float = 0.0  # requests per second; 0 in a closed loop

    @property
    def label(self) -> str:
        if self.rate:
            return f"{self.workload} {self.rate:g}/s"
        return (
            f"{self.workload} c={self.concurrency}" if self.workload == "closed" else self.workload
        )


def scenarios(workloads: Sequence[str], concurrency: Sequence[int], rate: float) -> list[Scenario]:
    """The lines to measure: `closed` once for every concurrency, the others once each."""
    lines: list[Scenario] = []
    for workload in workloads:
        if workload == "closed":
            lines += [Scenario(workload, workers) for workers in concurrency]
        elif workload == "shared-prefix":
            lines.append(Scenario(workload, SHARED_CONCURRENCY))
        elif workload == "poisson":
            lines.append(Scenario(workload, 0, rate))
        else:
            lines.append(Scenario(workload, 1))
    return lines


def requests(scenario: Scenario, sizes: Sizes, prompts: PromptMaker) -> list[Request]:
    """New requests for one run of `scenario`."""
    if scenario.workload == "prefill":
        return [prompts.request(sizes.prefill_tokens, 1)]
    if scenario.workload == "shared-prefix":
        prefix = prompts.pieces(sizes.prefix_tokens)
        length = sizes.prefix_tokens + SHARED_SUFFIX_TOKENS
        return [
            prompts.request(length, SHARED_OUTPUT_TOKENS, prefix) for _ in range(SHARED_REQUESTS)
        ]
    count = {
        "stream": 1,
        "closed": scenario.concurrency * sizes.requests_per_worker,
        "poisson": sizes.arrivals,
    }[scenario.workload]
    return [prompts.request(sizes.prompt_tokens, sizes.output_tokens) for _ in range(count)]
