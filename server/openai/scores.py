"""Log-probabilities in answers: OpenAI's two forms, and how tokens are spelled in them.

Also which characters of a text each of its tokens stands for.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ropewalk.model.tokenizers.base import Detokenizer, Tokenizer
from ropewalk.server.scheduling.request import TokenLogprob

# A token and its score; the first token of a prompt has none.
Scored = tuple[int, TokenLogprob | None]

# Stands for minus infinity, which JSON lacks; float32 softmax gives no finite value this low.
LOWEST_LOGPROB = -9999.0
_SPACES = re.compile(r"\s{0,256}")
# The most characters of a text that a tokenizer may have changed to one.
_CHANGED = 4
_FAR = 1000  # characters of pieces not found in the text, to search on after


class Speller:
    """Spells the scored tokens of one choice, in order."""

    def __init__(self, tokenizer: Tokenizer, *, first: bool) -> None:
        """first: the generated tokens begin a text."""
        self.tokenizer = tokenizer
        self._characters = Detokenizer(tokenizer, first=first)
        self._echoed: Iterator[str] = iter(())  # what the next tokens stand for
        self._spelled = 0  # characters

    def echo(self, text: str, prompt: Sequence[int]) -> None:
        """The tokens of a prompt come first, as parts of its text."""
        self._echoed = parts_of(text, self.tokenizer, prompt)

    def spell(self, token: int, *, last: bool = False) -> tuple[str, int]:
        """A scored token as text, and the character of the choice's text at which it begins.

        Call it once per scored token, in order, with `last` for the very last. The tokens join to
        the text, but for those that end it and special ones that the model generates: they are not
        part of it, and the special ones show their names.
        """
        begin = self._spelled
        text = next(self._echoed, None)
        if text is not None:
            self._spelled += len(text)
            return text, begin
        name = special(self.tokenizer, token)
        if name:
            return name, begin
        # An echoed prompt is decoded separately: no character spans prompt and answer.
        text = self._characters.push(token) + (self._characters.finish() if last else "")
        self._spelled += len(text)
        return text, begin


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def completion_scores(
    speller: Speller, scored: Sequence[Scored], *, ended: bool, as_ids: bool
) -> dict[str, Any]:
    """Four lists with one entry per token. Offsets count characters of the choice's text.

    ended: no more tokens follow. as_ids: "token_id:17" stands for a token.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    left = len(scored)
    for token, score in scored:
        left -= 1
        text, offset = speller.spell(token, last=ended and left == 0)
        shown = f"token_id:{token}" if as_ids else text
        tokens.append(shown)
        offsets.append(offset)
        if score is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(_finite(score.logprob))
        top: dict[str, float] = {}
        for other, logprob in score.top:
            # Best first: of two tokens with the same spelling the likelier one stays.
            label = shown if other == token else _label(speller.tokenizer, other, as_ids)
            top.setdefault(label, _finite(logprob))
        top.setdefault(shown, _finite(score.logprob))
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def chat_scores(tokenizer: Tokenizer, scored: Sequence[Scored], *, as_ids: bool) -> dict[str, Any]:
    """One list of the tokens of an answer."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        # Joined, the bytes are those of the text, to which a special token adds none.
        data = tokenizer.token_bytes(token, first=False)
        return {
            "token": _label(tokenizer, token, as_ids),
            "logprob": _finite(logprob),
            "bytes": None if special(tokenizer, token) else list(data),
        }

    return {
        "content": [
            {
                **entry(token, score.logprob),
                "top_logprobs": [entry(other, logprob) for other, logprob in score.top],
            }
            for token, score in scored
            if score is not None
        ]
    }


def _label(tokenizer: Tokenizer, token: int, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else spelled(tokenizer, token)


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
    """The part of `text` that each of its tokens stands for; they join to `text`.

    Each is as the token is spelled, where that is possible. A tokenizer may add a token before a
    text, drop white space, or compose letters. So a spelling that does not follow the one before it
    is looked for a little further on.
    """
    starts: list[int] = []
    at = missed = 0
    for piece in spell_prompt(tokenizer, tokens):
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
    for start, end in pairwise(starts):
        yield text[start:end]
