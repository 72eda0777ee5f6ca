"""What a step computes: a plan of work within limits, and what was sampled from it."""

from dataclasses import dataclass
from math import inf

from ropewalk.cache.types import OpReport
from ropewalk.server.errors import PromptTooLong, ServeError
from ropewalk.server.scheduling.request import ContextShift, Request, TokenLogprob

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

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and value < 1:
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
    prompt: int, source: int, context: int, *, model: str = "", param: str = "prompt"
) -> None:
    """Raises PromptTooLong unless prompt, source and a token of an answer fit into contexts.

    prompt, source: tokens that the decoder and an encoder read. model: named to a client, like
    the field that it sent.
    """
    what = param if model else "The prompt"
    of, end = (f" of {model}", "") if model else ("", ".")
    if source > context:
        reads = f"encoder{of} reads at most" if model else "encoder's context holds"
        raise PromptTooLong(
            f"{what} has {source} tokens, but the {reads} {context}; shorten it{end}", param
        )
    if prompt >= context:
        raise PromptTooLong(
            f"{what} has {prompt} tokens, but the context{of} holds {context}, at least one of "
            f"which is for the answer; shorten it{end}",
            param,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens start .. start + count - 1 of the request's context in this step."""

    request: Request
    start: int
    count: int

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
        return self.count + (len(self.request.source) if self.encodes else 0)


@dataclass(frozen=True, slots=True)
class Plan:
    work: tuple[Work, ...]
    preempted: int
    admitted: tuple[Request, ...]  # for the first time; their `cached` is set
    shifts: tuple[ContextShift, ...] = ()
    forks: tuple[OpReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's result for one request: its next token, or the error that ends it alone."""

    token: int
    logprob: TokenLogprob | None = None
    error: ServeError | None = None
