"""What is asked of the sampler: by a client, and for one row of logits. Plain data, no torch."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
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
    def needs_host(self) -> bool:
        """Whether the host takes part in picking a token, or in what is returned with it.

        Penalties need the preceding tokens, which the host knows.
        """
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalised or self.min_tokens or self.prompt_logprobs is not None)


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

    @property
    def changes_logits(self) -> bool:
        """Whether logits must be adjusted before a token is picked."""
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or (self._forbids_stops and params.stop_ids)
        )

    @property
    def takes_largest(self) -> bool:
        """Whether the pick is simply the row's largest logit."""
        return self.params.greedy and not self.changes_logits and self.allowed is None

    @property
    def _forbids_stops(self) -> bool:
        """Whether the answer is too short to end; `allowed` has been made with that in mind."""
        short = len(self.tokens) - self.num_prompt < self.params.min_tokens
        return short and self.allowed is None

    def changes(self) -> Mapping[int, tuple[float, float, float]]:
        """By token: a bias to add, the repetition penalty, and what to subtract after it.

        The repetition penalty considers prompt and answer, the other two only the answer.
        Stop tokens are forbidden while the answer is shorter than min_tokens.
        """
        params, changes = self.params, defaultdict[int, list[float]](lambda: [0.0, 1.0, 0.0])
        for token, bias in params.logit_bias.items():
            changes[token][0] = bias
        if params.repetition_penalty != 1:
            for token in set(self.tokens):
                changes[token][1] = params.repetition_penalty
        if params.presence_penalty or params.frequency_penalty:
            for token, count in Counter(self.tokens[self.num_prompt :]).items():
                changes[token][2] = params.presence_penalty + params.frequency_penalty * count
        if self._forbids_stops:
            for token in params.stop_ids:
                changes[token][2] = inf
        return {token: (bias, penalty, less) for token, (bias, penalty, less) in changes.items()}


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
