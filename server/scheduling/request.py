"""Requests, guesses at their answers, the work of a step, and what the engine says about it.

No torch.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle, islice
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from ropewalk.cache.keeper import SpillCounts
from ropewalk.cache.manager import BlockCounts
from ropewalk.cache.types import OpReport
from ropewalk.model.config import Pooling
from ropewalk.model.encodings.common.cost import NO_WORK, PositionalWork
from ropewalk.model.sampling import History, SamplingParams
from ropewalk.server.errors import PromptTooLong, ServeError
from ropewalk.server.scheduling.kept import Kept
from ropewalk.server.structured.matcher import Matcher


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the model's context is full; "length" on the wire
    ABORT = "abort"
    ERROR = "error"


class Overflow(StrEnum):
    """What happens to a request whose context is full."""

    REFUSE = "refuse"  # it ends, with finish reason CONTEXT
    SHIFT = "shift"  # half the blocks between the first and the last are dropped, rarely
    SLIDE = "slide"  # the oldest block after the first is dropped, often


ENCODED = "/encoder"  # suffix of the cache sequence that holds an encoder's output


def owner(sequence: str) -> str:
    """The id of the request that a sequence of the cache belongs to."""
    return sequence.removesuffix(ENCODED)


ALIKE = 3  # tokens that must be as before, for a guess at what follows
AHEAD = 7  # tokens that are guessed at most
USUAL_RATE, MOST_RATE = 0.5, 0.9  # of right guesses: until some were seen, and what is believed
NEWEST = 1 / 8  # how much the newest guess counts

Vector = NDArray[np.float64]


class Drafts:
    """Guesses at the next tokens of one request's answer: what followed its last ones before.

    Known as prompt lookup, or n-gram speculation: texts that repeat parts of what they were given,
    as edits and quotations do, get several tokens from one reading of the weights.
    """

    __slots__ = ("_guess", "_rate", "_read", "_stored")

    def __init__(self, prompt: Sequence[int] = (), predicted: "array[int] | None" = None) -> None:
        """predicted: what may follow the prompt."""
        self._stored = bytearray()  # 32-bit integers, to be searched as bytes
        if predicted:
            self._stored += (array("i", prompt[-ALIKE:]) + predicted).tobytes()
        self._read = 0
        self._guess: tuple[int, ...] = ()
        self._rate = USUAL_RATE  # how often a guess was right lately

    def next(self, tokens: Sequence[int], share: float, most: int) -> tuple[int, ...]:
        """At most so many guesses, of which each is expected to be right more often than `share`.

        tokens: all of the request, of which the new ones are read. A guess can only be right if
        those before it are.
        """
        self._follow(tokens)
        self._guess = self._found()
        if self._rate <= share:
            return ()
        worth = int(log(share) / log(self._rate))
        return self._guess[: min(worth, most)]

    def _follow(self, tokens: Sequence[int]) -> None:
        """Also learns whether the last guess was right, even if it was not worth checking."""
        new = tokens[self._read :]
        for token, guess in zip(new, self._guess, strict=False):
            self._rate += ((token == guess) - self._rate) * NEWEST
            if token != guess:
                break
        self._rate = min(self._rate, MOST_RATE)
        self._stored += array("i", new).tobytes()
        self._read = len(tokens)

    def _found(self) -> tuple[int, ...]:
        """What followed where the last tokens stood before, repeated if they overlap."""
        wide = array("i").itemsize
        last = self._stored[-ALIKE * wide :]
        end = len(self._stored) - wide
        while (at := self._stored.rfind(last, 0, end)) % wide and at >= 0:
            end = at + len(last) - 1  # it began within a token
        if at < 0:
            return ()
        start = at + len(last)
        after = array("i", self._stored[start : start + AHEAD * wide])
        return tuple(islice(cycle(after), AHEAD))


@dataclass(slots=True)
class Request:
    """One sequence. The scheduler narrows the gap between *known* and *computed* tokens.

    After `Engine.submit` only the engine thread touches it, except for `stop_after`, which the
    caller calls just before it aborts.
    """

    id: str
    tokens: list[int]  # known: prompt, then generated
    num_prompt: int
    params: SamplingParams
    arrival: float  # time.monotonic() when the server received it
    rng: random.Random
    matcher: Matcher | None = None  # follows the answer through the grammar it must satisfy
    source: tuple[int, ...] = ()  # what an encoder reads; `tokens` then begin with a start token
    salt: str = ""  # prefixes are shared only between equal salts
    client: str = ""  # who sent it, as far as API keys tell
    group: str = ""  # of the prompts that one HTTP request asks for; empty: this is the only one
    priority: int = 0  # within its client; lower is earlier
    overflow: Overflow = Overflow.REFUSE
    pooling: Pooling | None = None  # an embedding is wanted, and no answer
    sibling: str | None = None  # id of another request with the same prompt, to fork from
    origin: Kept | None = None  # its tokens are the first; shared, or appended to if also `keep`
    keep: str = ""  # id under which its sequence is kept when it has ended well
    front: int = 0  # tokens at the beginning that stay when others are dropped
    dropped: int = 0  # tokens after the front that the model no longer sees
    computed: int = 0  # tokens of the context whose K and V are stored
    cached: int = 0  # prompt tokens found in the prefix cache at first admission
    admitted: float | None = None  # monotonic time of the first admission
    first_token: float | None = None
    preemptions: int = 0
    computed_before: int = 0  # prompt tokens, at most, whenever it was preempted
    history: History = field(default_factory=History, init=False)  # of `tokens`, for penalties
    drafts: Drafts = field(default_factory=Drafts)
    draws: list[float] = field(default_factory=list)  # from `rng`, by token of the answer
    abort_as: FinishReason = FinishReason.ABORT  # STOP once a stop string has ended the text
    answered: int | None = None  # tokens until then: further ones were being computed
    # By position; nothing predicts the first token of a prompt.
    prompt_logprobs: list["TokenLogprob | None"] = field(default_factory=lambda: [None])
    pooled: "Vector | None" = None  # the sum of what an embedding is made of, as far as computed

    @property
    def guessable(self) -> bool:
        """Whether a token after a guessed one is picked as it would be without guessing.

        Penalties, a least length and a grammar look at all tokens before the one that is picked.
        """
        params, generated = self.params, self.num_generated
        return bool(
            generated
            and generated >= params.min_tokens
            and not params.penalises
            and self.matcher is None
            and self.pooling is None
        )

    def stop_after(self, answered: int) -> None:
        """A stop string has ended the text with so many tokens of the answer."""
        self.abort_as, self.answered = FinishReason.STOP, answered

    @property
    def appends(self) -> bool:
        """Whether it goes on with its origin itself, instead of sharing it."""
        return self.origin is not None and self.origin.id == self.keep

    @property
    def turn(self) -> str:
        """What takes turns with others of its client: an HTTP request, of one prompt or many."""
        return self.group or self.id

    @property
    def context_length(self) -> int:
        """Known tokens that the model sees: all but the dropped ones."""
        return len(self.tokens) - self.dropped

    @property
    def context_prompt(self) -> int:
        """How many of the tokens that the model sees are of the prompt."""
        return max(self.num_prompt - self.dropped, min(self.num_prompt, self.front))

    @property
    def computed_prompt(self) -> int:
        """Prompt tokens that are computed; dropping begins only when all of them are."""
        return self.num_prompt if self.dropped else min(self.computed, self.num_prompt)

    def context(self, start: int, stop: int) -> list[int]:
        """Tokens start .. stop - 1 of those that the model sees."""
        if start >= self.front:
            return self.tokens[start + self.dropped : stop + self.dropped]
        after = max(stop, self.front) + self.dropped
        return (
            self.tokens[start : min(stop, self.front)]
            + self.tokens[self.front + self.dropped : after]
        )

    def add_pooled(self, start: int, part: "Vector") -> None:
        """Hidden states were computed from token `start` on; `part` is the sum of those wanted."""
        first = start == 0 or self.pooled is None
        self.pooled = part if first or self.pooled is None else self.pooled + part

    def draw(self, place: int) -> float:
        """A random number in [0, 1) for a token of the answer, the same each time it is drawn."""
        while len(self.draws) <= place:
            self.draws.append(self.rng.random())
        return self.draws[place]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def prompt_length(self) -> int:
        """Tokens that the client sent, whichever side of the model reads them."""
        return len(self.source) or self.num_prompt

    @property
    def encoded(self) -> str:
        """The cache sequence of the encoder's output for `source`; the decoder's is `id`."""
        return f"{self.id}{ENCODED}"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, and of the most likely ones at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token of one request, or its end.

    `token` is None when a request ends without one: by an error, or with an `embedding`, the sum
    of the hidden states that it is made of. A token in
    `params.stop_ids` arrives with `finish` STOP: it counts as usage and is not text.
    `prompt_logprobs` comes with the first token when asked for; its first entry is None.
    """

    request_id: str
    token: int | None
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    error: ServeError | None = None
    embedding: Vector | None = None


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Reported once per request that reached the engine, when it ends. Monotonic seconds."""

    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival: float
    admitted: float | None
    first_token: float | None
    end: float


class Phase(StrEnum):
    """What a step computes: for requests before their first token, after it, or for both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds that one pass of the decoder took; the parts are within `forward`."""

    forward: float
    attention: float  # over stored K and V, with any positional work inside the kernel
    position: float | None  # None where attention does some of it


@dataclass(frozen=True, slots=True)
class ContextShift:
    """One request's context was shortened. Without a report nothing was cached to be moved."""

    kept: int  # tokens
    dropped: int
    seconds: float
    report: OpReport | None

    @property
    def outcome(self) -> str:
        """What became of the cached entries that stay."""
        if self.report is None:
            return "recomputed"
        return "rerotated" if self.report.rewritten else "reindexed"


KEPT = 8  # one place in so many is kept for others than whoever has all the rest


@dataclass(frozen=True, slots=True)
class Limits:
    max_seqs: int  # requests in one step
    max_step_tokens: int  # tokens in one step
    max_context: int  # tokens of one request that the model sees, prompt and generated
    max_queue: int  # waiting requests beyond those that the next step may admit
    lone_factor: int = 1  # multiplies max_step_tokens while there is only one request
    max_queue_s: float = inf  # that a request may wait before the first of its prompts runs
    several_clients: bool = False  # there are several API keys
    draft_tokens: int = 0  # guesses that are computed for one request in one step

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and value < (name != "draft_tokens"):
                raise ValueError(f"{name} is {value}; use 1 or more")

    @property
    def most_seqs(self) -> int:
        """Places in a step that one client or one HTTP request may have: some are for others."""
        return self.max_seqs - self.max_seqs // KEPT

    @property
    def most_queue(self) -> int:
        """Places in the queue that one client may have."""
        return self.max_queue - self.max_queue // KEPT * self.several_clients


def check_length(
    prompt: int, source: int, context: int, *, param: str = "prompt", answered: bool = True
) -> None:
    """Raises PromptTooLong unless prompt, source and a token of an answer fit into contexts.

    answered: False for an embedding, which may take all of the context.
    prompt, source: tokens that the decoder and an encoder read. param: the field that was sent.
    """
    if source > context:
        raise too_long(param, f"{source} tokens", context, " for its encoder")
    if prompt > context and not answered:
        raise too_long(param, f"{prompt} tokens", context)
    if prompt >= context and answered:
        what = ", at least one of which is for the answer"
        raise too_long(param, f"{prompt} tokens", context, what)


def too_long(param: str, has: str, context: int, what: str = "") -> PromptTooLong:
    """In words by which clients recognise it that have a plan for this: litellm and LangChain."""
    return PromptTooLong(
        f"{param} has {has}: the prompt is too long, as this model's maximum context length is "
        f"{context} tokens{what}; shorten it",
        param,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens start .. start + count - 1 of the request's context in this step.

    drafts: guesses at the tokens after them, which are computed as well. Then `count` reaches the
    last known token.
    """

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this reaches the last known token, or one that only the device knows.

        Meaningful until the plan is recorded.
        """
        return self.start + self.count >= self.request.context_length

    @property
    def decodes(self) -> bool:
        """Whether the request has its first token before this work."""
        return self.request.num_generated > 0 or self.start >= self.request.num_prompt

    @property
    def encodes(self) -> bool:
        """Whether the request's source is encoded first, whole, as after every admission."""
        return self.start == 0 and bool(self.request.source)

    @property
    def rows(self) -> int:
        """Tokens that the step computes for it, on both sides of the model."""
        return self.width + (len(self.request.source) if self.encodes else 0)

    @property
    def width(self) -> int:
        """Tokens that the decoder computes for it."""
        return self.count + len(self.drafts)


@dataclass(frozen=True, slots=True)
class Plan:
    work: tuple[Work, ...]
    preempted: int
    admitted: tuple[Request, ...]  # for the first time; their `cached` is set
    shifts: tuple[ContextShift, ...] = ()
    forks: tuple[OpReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's result for one request: its next token, or the error that ends it alone.

    pooled: of an embedding, the sum of the step's hidden states that it is made of. following: what
    was picked after drafts that were right.
    """

    token: int
    logprob: TokenLogprob | None = None
    error: ServeError | None = None
    pooled: Vector | None = None
    following: tuple["Sampled", ...] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a new request has to expect, as of the last step."""

    seats: int = 1  # waiting requests that the next step may admit
    idle: bool = False  # no request runs or waits
    waiting: int = 0
    places: int = 1 << 30  # those that may wait besides
    # Between two ends of requests, each of which lets one of those that wait run; None: not known.
    gap_s: float | None = None
    apart_s: float = 0.0  # the same as far as it can be guessed, for those who are refused
    most_s: float = inf  # that a request may wait

    def wait(self, ahead: int) -> float:
        """Seconds that a request waits when so many are to run before it; 0 if not known."""
        return max(0, ahead + 1 - self.seats) * (self.gap_s or 0.0)


NO_BLOCKS = BlockCounts(free=0, active=0, cached=0)
NO_SPILL = SpillCounts()


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did, and how things stand after it."""

    seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    batch_requests: int = 0
    forced_tokens: int = 0  # of the generated ones, those that a grammar left no choice about
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0  # those that were right
    computed_prompt_tokens: int = 0  # once per request: recomputation after preemption excluded
    cached_prompt_tokens: int = 0  # found in the cache, of prefix_queried_tokens
    generated_tokens: int = 0
    written_entries: int = 0  # K and V vectors: 2 · layers · kv_heads per token
    written_bytes: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0  # once per request, at first admission
    evicted_blocks: int = 0  # cached content given up to make room
    flushed_blocks: int = 0  # cached content forgotten on demand
    spill: SpillCounts = NO_SPILL  # moves: in this step
    blocks: BlockCounts = NO_BLOCKS
    sealed_blocks: int = 0
    verified_blocks: int = 0
    mutated_entries: int = 0  # of the layers and parts of blocks that changed
    verified_weights: int = 0  # bytes
    changed_weights: int = 0  # pieces of weights whose checksum no longer matched
    shifts: tuple[ContextShift, ...] = ()
    forks: tuple[OpReport, ...] = ()
    kept: tuple[OpReport, ...] = ()  # operations on kept sequences, since the step before
    prefill_work: PositionalWork = NO_WORK  # before a request's first token
    decode_work: PositionalWork = NO_WORK
    phase: Phase | None = None  # None: nothing was computed
    # The longest context of a step in which every request decodes one token.
    decode_context: int | None = None
    timed: tuple[PassTimes, ...] = ()  # of those of its passes that were timed; mostly none
    extrapolated_tokens: int = 0  # generated at positions past the trained context
    inter_token_seconds: tuple[float, ...] = ()
    outlook: Outlook = Outlook()
    ended: tuple[RequestSummary, ...] = ()
