"""What is asked of the sampler: by a client, and for one row of logits. Plain data, no torch."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion picks its tokens and when it ends. Validated at the HTTP boundary.

    `temperature` below 1e-5 means greedy. `top_k` 0 and `top_p` 1 mean no limit. `seed` None
    means fresh random numbers, drawn by the sampler's caller. `logprobs` None means none are
    returned; k means those of the chosen token and of the k most likely ones. `stop_ids` end the
    completion and are not part of the text; they include the model's own end-of-text tokens
    unless the client asked to ignore them.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


class History:
    """The tokens of a prompt and its answer, each once, and how often the answer has it."""

    __slots__ = ("_places", "_read", "counts", "tokens")

    def __init__(self) -> None:
        self.tokens, self.counts = array("q"), array("q")
        self._places: dict[int, int] = {}
        self._read = 0

    def follow(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Look at those tokens, always of the same request, that are new since the last call."""
        for at in range(self._read, len(tokens)):
            place = self._places.setdefault(tokens[at], len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(tokens[at])
                self.counts.append(0)
            self.counts[place] += at >= num_prompt
        self._read = len(tokens)


class Allowed(Protocol):
    """The only tokens that may be picked. Raises a ServeError where there are none."""

    def includes(self, token: int) -> bool:
        """Much quicker than to find all of them."""
        ...

    def bits(self) -> bytes:
        """A bit for each token, lowest first."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What to sample from one row of logits."""

    params: SamplingParams
    tokens: Sequence[int]  # prompt and generated tokens
    num_prompt: int
    uniform: float  # in [0, 1): selects the token; unused when greedy
    allowed: Allowed | None = None
    coming: bool = False  # whether another token precedes that only the device knows yet
    history: History = field(default_factory=History)  # of `tokens`, as far as it was needed

    @property
    def changes_logits(self) -> bool:
        """Whether logits must be adjusted before a token is picked."""
        return bool(self.params.logit_bias or self.params.penalises or self.forbidden)

    @property
    def takes_largest(self) -> bool:
        """Whether the pick is simply the row's largest logit."""
        return self.params.greedy and not self.changes_logits and self.allowed is None

    @property
    def forbidden(self) -> frozenset[int]:
        """The stop tokens, while the answer is too short; `allowed` has been made with that."""
        generated = len(self.tokens) + self.coming - self.num_prompt
        short = generated < self.params.min_tokens and self.allowed is None
        return self.params.stop_ids if short else frozenset()


@dataclass(frozen=True, slots=True)
class Picked:
    """A token; meaningless where the row is not finite."""

    token: int
    finite: bool
    logprob: float | None = None  # of the token, if requested
    top: tuple[tuple[int, float], ...] = ()  # most likely tokens, log-probabilities


def allows(mask: bytes, token: int) -> bool:
    """Whether the token's bit is set: a mask has a bit for each token, lowest first."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
