"""What a client may ask of the sampler. Plain data, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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

        Penalties need the preceding tokens, which the host knows, and the host tries again where
        the candidates did not hold all that top_p and min_p keep.
        """
        truncated = not (self.greedy or self.top_k) and (self.top_p < 1 or self.min_p > 0)
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(truncated or penalised or self.min_tokens or self.prompt_logprobs is not None)


def allows(mask: bytes, token: int) -> bool:
    """Whether the token's bit is set: a mask has a bit for each token, lowest first."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
