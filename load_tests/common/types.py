"""The terms of a load test: plain data that all modules here share. No HTTP, no arithmetic.

A *variant* is what is compared. A *point* is one size of a workload (longctx at 2,048 tokens), a
*profile* says when its requests are sent, and a *cell* is a point under a profile. A *run* measures
one variant in one cell once; a *round* is one run of every variant in every cell, in random order,
so that drift of the machine affects all variants alike. The *baseline* is the variant that others
are compared with.

The modules, in the order of a load test (an arrow: uses):

    bench → options, progress           the command, from its options to its exit status
    serving → process, memory           what is compared, if the benchmark starts it
    facts, environment                  what servers and the machine report about themselves
    loads → workloads, profiles         which requests are sent, and when
    workloads → prompts, conversation
    runner → arrivals, hits             rounds, runs, and the requests of one run
    client → exchange → http1           one request and its stream
    scrape                              what the server counted during a run
    result                              result.json
    cells → differences → statistics    figures of runs, and whether variants differ
    table, page → plots → *_plots       the report, as text and as HTML
    *_plots → plot → charts → svg       one plot: findings, charts, numbers; words has the sentences
    compare                             two results

plan predicts what many replicas do: plan → service, simulate → prefix_cache, dispatch → routing,
traffic, and figures.

Programs of their own, over HTTP: self_test (is the client fast enough?), overload and soak (what
happens when more is asked than a server can?), peers with systems, peer_table, roofline and
openvino_server (beside another server), replicas and behind_ray (behind a router). Without a
server:

    step_cost, scaling → scaling_parts       what encodings and sizes cost a step
    gpu_check → gpu_parts, gpu_peer, gpu_table, roofline
    profile_step → profile_engine, profile_http                   where a step's time goes
    all of them → in_process, engines, rounds, measured           decoders, steps, samples, files
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ProfileKind = Literal["sync", "closed", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class Profile:
    """When requests are sent. `sync` is one at a time, `closed` a number of workers."""

    kind: ProfileKind
    concurrency: int = 1  # of sync and closed
    rate: float = 0.0  # requests per second, of poisson and gamma
    burstiness: float = 1.0  # of gamma: 1 is Poisson, below 1 more bursty, above more even

    @property
    def label(self) -> str:
        """In the form of `--profile`."""
        if self.kind == "closed":
            return f"closed:{self.concurrency}"
        if self.kind == "poisson":
            return f"poisson:{self.rate:g}"
        if self.kind == "gamma":
            return f"gamma:{self.rate:g}:{self.burstiness:g}"
        return "sync"

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent however many are unanswered."""
        return self.kind in ("poisson", "gamma")


@dataclass(frozen=True, slots=True)
class Point:
    """One size of a workload. `context` is its place on a plot's axis, if there is one."""

    workload: str
    label: str
    context: int | None = None  # tokens at its last step, prompt and answer together


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to ask for. `prompt_tokens` is how many tokens the prompt should have."""

    prompt: str | tuple[int, ...]
    prompt_tokens: int | None  # None: a user's text, whose tokens only the server knows
    output_tokens: int
    leaves_after: int | None = None  # chunks with text after which the client hangs up
    extra: Mapping[str, object] = field(default_factory=dict)  # more fields of the body


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request. Times are `time.perf_counter` seconds.

    `chunks` has one (time, tokens so far) for each chunk with text. `error` is None on success:
    status 200, no error frame, [DONE] and exactly the tokens asked for; or, for a client that was
    to leave, that it left as planned (`left`).
    """

    intended: float  # when it should have been sent
    sent: float
    ended: float
    chunks: tuple[tuple[float, int], ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    left: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServerView:
    """What the server's own /metrics say about one run of one variant."""

    counters: Mapping[str, float]  # increase over the run, by name{label="value"}
    gauges: Mapping[str, float]  # highest value seen while it ran
    disagreements: tuple[str, ...]  # one sentence each: where client and server differ


@dataclass(frozen=True, slots=True)
class Run:
    """One cell of one variant, measured once. The steady window is [`steady_from`, `steady_to`]."""

    variant: str
    point: Point
    profile: Profile
    round: int
    outcomes: tuple[Outcome, ...]
    steady_from: float  # time.perf_counter: the first worker's second request, or first answer
    steady_to: float  # when the first worker found nothing left, or the next arrival was due
    server: ServerView | None = None  # None: it has no /metrics

    @property
    def began(self) -> float:
        return min(outcome.sent for outcome in self.outcomes)

    @property
    def ended(self) -> float:
        return max(outcome.ended for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Result:
    """A whole load test, as result.json holds it."""

    command: str  # that repeats it
    arguments: Mapping[str, object]
    environment: Mapping[str, object]  # python, processor, cores, commit, versions of the servers
    variants: Mapping[str, Mapping[str, object]]  # label → model, encoding, url, form or storage
    baseline: str | None  # the variant that differences are taken against; None with one variant
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]
