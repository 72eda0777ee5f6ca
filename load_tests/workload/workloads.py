"""The workloads: which requests a run sends. Knows neither HTTP nor results.

The seed of the prompts determines everything. A plan is made once per run and sent to every
variant, so every variant gets the same token ids, and no server gets a prompt twice, except from a
file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ropewalk.load_tests.common.types import Point, Profile, Request
from ropewalk.load_tests.workload.conversation import conversation
from ropewalk.load_tests.workload.prompts import PromptMaker, read_prompts

SUFFIX_TOKENS = 32  # of shared-prefix, after the prefix
SUFFIX_OUTPUT_TOKENS = 32
STEP_OUTPUT_TOKENS = 192  # of longctx and extrapolate: over a second, for a stable median
SHIFT_MARGIN = 32  # tokens before the context is full, and as many after
EXTRAPOLATION = (1, 2, 4)  # times the trained context
LEAVING_SHARE = 0.2
TURNS = 3
_FILE = "file:"

_ONE = Profile("sync")
_EIGHT = Profile("closed", concurrency=8)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and counts that a user may change, and two numbers that the servers report."""

    prompt_tokens: int = 128  # of stream and cancel; median of chat's first turn
    output_tokens: int = 128  # of stream, cancel and files; median of chat
    prefill_tokens: int = 1024
    prefix_tokens: int = 768
    prefixes: int = 8
    requests_per_prefix: int = 4
    contexts: tuple[int, ...] = (512, 2048, 8192)  # of longctx
    requests_per_worker: int = 4  # of sync and closed
    arrivals: int = 32  # of open loops
    context: int = 2048  # the largest `max_model_len` of the variants
    trained_context: int = 2048  # the smallest of the variants


@dataclass(frozen=True, slots=True)
class Draft:
    """What the requests of one run are made from."""

    point: Point
    profile: Profile
    prompts: PromptMaker
    sizes: Sizes

    @property
    def count(self) -> int:
        """How many requests a run has, if the workload leaves that to the profile."""
        if self.profile.open_loop:
            return self.sizes.arrivals
        return self.profile.concurrency * self.sizes.requests_per_worker

    def request(self, prompt_tokens: int, output_tokens: int) -> Request:
        return Request(self.prompts.prompt(prompt_tokens), prompt_tokens, output_tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` makes those of one run. `sized` gives the points to measure, if several.

    `context` is how many tokens, prompt and answer together, a model started for it should take.
    """

    name: str
    help: str
    profile: Profile  # unless another is asked for
    context: Callable[[Sizes], int]
    requests: Callable[[Draft], list[Request]]
    sized: Callable[[Sizes], list[Point]] | None = None

    def points(self, sizes: Sizes) -> list[Point]:
        """The points to measure."""
        return [Point(self.name, self.name)] if self.sized is None else self.sized(sizes)

    def plan(
        self, point: Point, profile: Profile, prompts: PromptMaker, sizes: Sizes
    ) -> list[Request]:
        """New requests for one run. Raises ValueError when sizes leave no room for them."""
        return self.requests(Draft(point, profile, prompts, sizes))


def workload_from(text: str) -> Workload:
    """`--workload`: a name, or file:PATH. Raises ValueError, and OSError for a file."""
    if text.startswith(_FILE):
        return _from_file(text.removeprefix(_FILE))
    if text not in WORKLOADS:
        raise ValueError(
            f"there is no workload {text!r}; use {', '.join(WORKLOADS)} or {_FILE}PATH"
        )
    return WORKLOADS[text]


def _from_file(path: str) -> Workload:
    lines = read_prompts(path)

    def requests(draft: Draft) -> list[Request]:
        return [
            Request(
                prompt,
                None if isinstance(prompt, str) else len(prompt),
                max_tokens or draft.sizes.output_tokens,
            )
            for prompt, max_tokens in lines
        ]

    name, what = f"{_FILE}{Path(path).name}", "the prompts of a file, in its order"
    return Workload(name, what, _EIGHT, _served_context, requests)


def _served_context(sizes: Sizes) -> int:
    return sizes.context


def _stream_context(sizes: Sizes) -> int:
    return sizes.prompt_tokens + sizes.output_tokens


def _stream(draft: Draft) -> list[Request]:
    sizes = draft.sizes
    return [draft.request(sizes.prompt_tokens, sizes.output_tokens) for _ in range(draft.count)]


def _prefill(draft: Draft) -> list[Request]:
    return [draft.request(draft.sizes.prefill_tokens, 1) for _ in range(draft.count)]


def _chat(draft: Draft) -> list[Request]:
    """All first turns, then all second ones, so that a turn finds its predecessor answered.

    There are at least as many conversations as workers.
    """
    sizes = draft.sizes
    conversations = max(draft.profile.concurrency, -(-draft.count // TURNS))
    talks = [
        conversation(draft.prompts, TURNS, sizes.prompt_tokens, sizes.output_tokens, sizes.context)
        for _ in range(conversations)
    ]
    return [talk[turn] for turn in range(TURNS) for talk in talks]


def _longctx_points(sizes: Sizes) -> list[Point]:
    return [Point("longctx", f"longctx {tokens:,}", tokens) for tokens in sizes.contexts]


def _longctx(draft: Draft) -> list[Request]:
    """Requests that end at the point's context: their last steps are what is measured.

    Under sync, one is enough; with workers, the first wave is the warm-up of a closed loop.
    """
    assert draft.point.context is not None
    length = draft.point.context - STEP_OUTPUT_TOKENS
    if length < 1:
        raise ValueError(
            f"{draft.point.label} leaves no prompt: use contexts above {STEP_OUTPUT_TOKENS} tokens"
        )
    count = 1 if draft.profile.kind == "sync" else draft.count
    return [draft.request(length, STEP_OUTPUT_TOKENS) for _ in range(count)]


def _shared_prefix(draft: Draft) -> list[Request]:
    """The first request of every prefix, then the second of each: as far apart as possible."""
    sizes, prompts = draft.sizes, draft.prompts
    prefixes = [prompts.pieces(sizes.prefix_tokens) for _ in range(sizes.prefixes)]
    length = sizes.prefix_tokens + SUFFIX_TOKENS
    return [
        Request(prompts.prompt(length, prefix), length, SUFFIX_OUTPUT_TOKENS)
        for _ in range(sizes.requests_per_prefix)
        for prefix in prefixes
    ]


def _shift(draft: Draft) -> list[Request]:
    """Each answer begins SHIFT_MARGIN before the context is full and ends as far beyond."""
    length = draft.sizes.context - SHIFT_MARGIN
    if length < 1:
        raise ValueError(
            f"a context of {draft.sizes.context} tokens is too short to be shifted; serve the "
            f"model with more than {SHIFT_MARGIN}"
        )
    return [
        replace(draft.request(length, 2 * SHIFT_MARGIN), extra={"overflow": "shift"})
        for _ in range(draft.count)
    ]


def _extrapolate_points(sizes: Sizes) -> list[Point]:
    return [
        Point("extrapolate", f"extrapolate {times}x", times * sizes.trained_context)
        for times in EXTRAPOLATION
    ]


def _cancel(draft: Draft) -> list[Request]:
    requests = _stream(draft)
    dice = draft.prompts.random
    for index in dice.sample(range(len(requests)), round(LEAVING_SHARE * len(requests))):
        moment = dice.randrange(1, max(2, draft.sizes.output_tokens))
        requests[index] = replace(requests[index], leaves_after=moment)
    return requests


_ALL = (
    Workload(
        "chat",
        f"conversations of {TURNS} turns of varied length; each extends the prompt before it",
        _EIGHT,
        _served_context,
        _chat,
    ),
    Workload("stream", "prompts and answers of one size", _ONE, _stream_context, _stream),
    Workload(
        "prefill",
        "a long prompt, one new token",
        _ONE,
        lambda sizes: sizes.prefill_tokens + 1,
        _prefill,
    ),
    Workload(
        "longctx",
        "step latency against context length",
        _ONE,
        lambda sizes: max(sizes.contexts),
        _longctx,
        _longctx_points,
    ),
    Workload(
        "shared-prefix",
        "several requests for each of several long prefixes",
        _EIGHT,
        lambda sizes: sizes.prefix_tokens + SUFFIX_TOKENS + SUFFIX_OUTPUT_TOKENS,
        _shared_prefix,
    ),
    Workload(
        "shift", "answers that outgrow the context, which is shifted", _ONE, _served_context, _shift
    ),
    Workload(
        "extrapolate",
        "step latency within, at 2 and at 4 times the trained context",
        _ONE,
        lambda sizes: max(EXTRAPOLATION) * sizes.trained_context,
        _longctx,
        _extrapolate_points,
    ),
    Workload(
        "cancel",
        f"as stream, but {LEAVING_SHARE:.0%} of the clients leave at a random moment",
        _EIGHT,
        _stream_context,
        _cancel,
    ),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
