"""How a model writes: the same prompts, continued with the same random numbers for every model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropewalk.model.family.evaluation.reading import Reader
from ropewalk.model.tokenizers.base import Tokenizer

PROMPTS = ("The captain looked at the sea and", "My friends, the state of our country")
TOKENS = 48
TEMPERATURE = 0.7
SEED = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """`answer` is what the model wrote after `prompt`."""

    prompt: str
    answer: str


def measure(
    reader: Reader, tokenizer: Tokenizer, prompts: Sequence[str] = PROMPTS
) -> tuple[Sample, ...]:
    """TOKENS tokens after each prompt."""
    return tuple(
        Sample(prompt, continuation(reader, tokenizer, prompt, TEMPERATURE, SEED, TOKENS))
        for prompt in prompts
    )


def continuation(
    reader: Reader, tokenizer: Tokenizer, prompt: str, temperature: float, seed: int, length: int
) -> str:
    """The text of `length` tokens after the prompt, sampled without truncation by the seed."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = tokenizer.encode(prompt, bos=True)
    first, start = len(tokens), 0
    for _ in range(length):
        row = reader.read(tokens, wanted=1, start=start)[-1].cpu()
        start = len(tokens)
        chances = (row / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=drawn)))
    written = b"".join(tokenizer.token_bytes(token, first=False) for token in tokens[first:])
    return written.decode(errors="replace")
