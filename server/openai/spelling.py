"""Which characters of a text each of its tokens stands for. Knows neither scores nor formats."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ropewalk.model.tokenizers.base import Detokenizer, Tokenizer

_SPACES = re.compile(r"\s{0,256}")
# The most characters of a text that a tokenizer may have changed to one.
_CHANGED = 4
_FAR = 1000  # characters of pieces not found in the text, to search on after


def spelled(tokenizer: Tokenizer, token: int, *, first: bool = False) -> str:
    """One token as text: a special one by its name; bytes that are no character as U+FFFD."""
    data = tokenizer.token_bytes(token, first=first)
    return data.decode(errors="replace") if data else special(tokenizer, token)


def special(tokenizer: Tokenizer, token: int) -> str:
    """The name of a special token; empty for any other."""
    return "" if tokenizer.token_bytes(token, first=False) else tokenizer.name(token)


def spell_prompt(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text of a prompt, in which special tokens have their names.

    Of the tokens that make up a character, the last adds it; none spans a special token.
    """
    characters = Detokenizer(tokenizer, first=True)
    pieces = []
    for place, token in enumerate(tokens, start=1):
        piece, name = characters.push(token), special(tokenizer, token)
        if name or place == len(tokens):
            piece += characters.finish()
        pieces.append(piece + name)
    return pieces


def parts_of(text: str, tokenizer: Tokenizer, tokens: Sequence[int]) -> Iterator[str]:
    """The part of `text` that each of its tokens stands for; they join to `text`."""
    yield from _divide(text, spell_prompt(tokenizer, tokens))


def _divide(text: str, pieces: Sequence[str]) -> list[str]:
    """`text` in as many parts as there are pieces, each equal to its piece where that is possible.

    A tokenizer may add a token before a text, drop white space, or compose letters. So a piece
    that does not follow the one before it is looked for a little further on.
    """
    starts: list[int] = []
    at = missed = 0
    for piece in pieces:
        if not text.startswith(piece, at):
            piece = piece.strip() or piece
        spaces = _SPACES.match(text, at)
        reach = (spaces.end() if spaces else at) + _CHANGED * missed + len(piece)
        found = text.find(piece, at, reach) if piece else at
        starts.append(max(found, at))
        if found < 0:
            missed = min(missed + len(piece), _FAR)
        elif piece:
            at, missed = found + len(piece), 0
    starts = [0, *starts[1:], len(text)]
    return [text[start:end] for start, end in pairwise(starts)]
