"""Turns of one chat, whose prompts extend each other. Knows no server: answers are stand-ins."""

import math

from load_tests.prompts import PromptMaker, pieces_of
from load_tests.terms import Request

_SPREAD = 0.6  # of the logarithm of a length
_MULTIPLE = 4  # of lengths; see `conversation`


def conversation(
    prompts: PromptMaker, turns: int, prompt_tokens: int, output_tokens: int, context: int
) -> list[Request]:
    """Each prompt is the one before it, a stand-in for its answer, and something new.

    `prompt_tokens` and `output_tokens` are the middle of the first prompts' and of the answers'
    lengths; what is new later is a quarter of the former. What would not fit into `context`
    tokens begins anew.

    No arm's real answer can stand there: every arm gets the same token ids. It differs from the
    answer before the next block is full, since lengths are multiples of 4 and so leave at least 4
    tokens of that block to it.
    """
    requests: list[Request] = []
    length = 0
    for _ in range(turns):
        output = _length(prompts, output_tokens, context // 2)
        most = context - output
        longer = length and length + _length(prompts, prompt_tokens // 4, most)
        if 0 < longer <= most:
            prompt = prompts.prompt(longer, pieces_of(requests[-1].prompt))
        else:
            longer = _length(prompts, prompt_tokens, most)
            prompt = prompts.prompt(longer)
        requests.append(Request(prompt, longer, output))
        length = longer + output
    return requests


def _length(prompts: PromptMaker, middle: int, most: int) -> int:
    """Tokens: log-normal around `middle`, so half are shorter and a few are much longer."""
    drawn = middle * math.exp(prompts.random.gauss(0.0, _SPREAD))
    return max(1, min(round(drawn), most) // _MULTIPLE) * _MULTIPLE
