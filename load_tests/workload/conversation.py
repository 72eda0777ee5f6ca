"""Turns of one chat, whose prompts extend each other. Needs no server: answers are made up."""

import math

from ropewalk.load_tests.common.types import Request
from ropewalk.load_tests.workload.prompts import PromptMaker, pieces_of

_SPREAD = 0.6  # standard deviation of the logarithm of a length
_MULTIPLE = 4  # of lengths; see `conversation`


def conversation(
    prompts: PromptMaker, turns: int, prompt_tokens: int, output_tokens: int, context: int
) -> list[Request]:
    """Each prompt is the previous one, a made-up answer to it, and new tokens.

    `prompt_tokens` and `output_tokens` are the median lengths of first prompts and of answers;
    later turns add a quarter of the former. A turn that would not fit into `context` tokens starts
    a new conversation.

    Answers are made up because every variant must get the same token ids. A made-up one differs
    from the real one before the next block is full, since lengths are multiples of 4 and so leave
    at least 4 tokens of that block to it.
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
    """Tokens: log-normal around `middle`, so half are shorter and a few much longer."""
    drawn = middle * math.exp(prompts.random.gauss(0.0, _SPREAD))
    return max(1, min(round(drawn), most) // _MULTIPLE) * _MULTIPLE
