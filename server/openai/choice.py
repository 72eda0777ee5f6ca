"""Turns the engine's events into one choice of an answer: text, scores, how it ended.

Also which characters of a text each of its tokens stands for. Knows tokens and text, but neither
HTTP nor the wire format.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ropewalk.model.tokenizers.base import Detokenizer, StopText, Tokenizer
from ropewalk.server.scheduling.request import FinishReason, Request, TokenEvent, TokenLogprob
from ropewalk.server.tools.parser import Delta, Parser

# A token and its score; the first token of a prompt has none.
Scored = tuple[int, TokenLogprob | None]

_ON_THE_WIRE = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}


@dataclass(slots=True)
class Piece:
    """What one wake-up adds to a choice. `first` is set on the first, `finish` on the last one.

    `deltas` are text, reasoning and calls in order, where there is a parser to tell them apart.
    """

    first: bool = False
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # generated
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None


class Choice:
    """One completion as it grows.

    `cut` says that the choice has ended at a stop string, which the engine does not know yet.
    `tokens` counts generated tokens, including the one that ended the choice. With `prompt_alone`
    the request's only token, which is needed to compute the prompt, is left out of the answer.
    A `parser` tells reasoning and calls from text, in which alone stop strings are looked for.
    `reasoning` counts the tokens of reasoning; None without a parser.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
        echo: str = "",
        prompt_alone: bool = False,
        parser: Parser | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        self.prompt = request.source or tuple(request.tokens)
        self.tokens = 0
        self.cached = 0
        self.finished = False
        self.cut = False
        # A decoder-only model continues its prompt; after an encoder the answer stands alone.
        alone = bool(request.source)
        self._detokenizer = Detokenizer(
            tokenizer, first=alone, named=parser.named if parser else ()
        )
        self._stop, self._include_stop = stop, include_stop
        self._stops = StopText(stop, include_stop=include_stop)
        self._parser = parser
        self.parsed = parser is not None
        self.reasoning = None if parser is None else 0
        self._stop_token_ids = stop_token_ids
        self._prompt_alone = prompt_alone
        self._scores = request.params.logprobs is not None
        self._echo = echo
        # State of `spell`: the echoed tokens still to come, and what has been spelled so far.
        self._echoed: Iterator[str] = iter(())
        self._characters = Detokenizer(tokenizer, first=alone)
        self._spelled = 0

    def take(self, events: Sequence[TokenEvent]) -> Piece:
        """The piece that these events add. Raises the ServeError that an event carries."""
        piece = Piece()
        for event in events:
            if event.error is not None:
                raise event.error
            if not self.tokens:
                self._open(piece, event)
            self._add(piece, event)
            if self.finished:
                break
        return piece

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

    def _open(self, piece: Piece, event: TokenEvent) -> None:
        self.cached = event.cached_tokens
        piece.first = True
        piece.text += self._echo
        if event.prompt_logprobs is not None:
            piece.scored += zip(self.prompt, event.prompt_logprobs, strict=True)
            self._echoed = parts_of(self._echo, self.tokenizer, self.prompt)

    def _add(self, piece: Piece, event: TokenEvent) -> None:
        if self._prompt_alone:
            self.finished, piece.finish = True, "length"
            return
        if event.token is not None:
            self.tokens += 1
            piece.tokens.append(event.token)
            if self._scores:
                piece.scored.append((event.token, event.logprob))
            if event.finish is FinishReason.STOP and event.token in self.request.params.stop_ids:
                if event.token in self._stop_token_ids:
                    piece.stop_reason = event.token
            else:
                self._write(piece, self._detokenizer.push(event.token))
        if event.finish is not None:
            self._write(piece, self._detokenizer.finish(), last=True)
        if self._stops.stopped_by is not None:
            self.finished, piece.finish = True, "stop"
            piece.stop_reason = self._stops.stopped_by
        elif event.finish is not None:
            self.finished, piece.finish = True, _ON_THE_WIRE[event.finish]
        elif self._parser is not None and self._parser.done:
            self.finished, piece.finish = True, "stop"
        self.cut = self.finished and event.finish is None
        if piece.finish == "stop" and self._parser is not None and self._parser.calls:
            piece.finish = "tool_calls"

    def _write(self, piece: Piece, text: str, *, last: bool = False) -> None:
        if self._parser is None:
            piece.text += self._stops.push(text) + (self._stops.finish() if last else "")
            return
        thinking = self._parser.thinking
        deltas = self._parser.push(text) + (self._parser.finish() if last else [])
        if self.reasoning is not None and not last:
            self.reasoning += thinking or self._parser.thinking
        for delta in deltas:
            if delta.content:
                self._say(piece, self._stops.push(delta.content))
            else:  # no stop string spans what is not text
                self._say(piece, self._stops.finish())
                self._stops = StopText(self._stop, include_stop=self._include_stop)
                piece.deltas.append(delta)
            if self._stops.stopped_by is not None:
                return
        if last:
            self._say(piece, self._stops.finish())

    def _say(self, piece: Piece, text: str) -> None:
        if text:
            piece.text += text
            piece.deltas.append(Delta(content=text))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `reasoning`, None where nothing looked for it, is part of `completion`."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None = None

    def plain(self) -> dict[str, object]:
        more = {}
        if self.reasoning is not None:
            more["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **more,
        }


def total_usage(choices: Sequence[Choice], n: int) -> Usage:
    """The usage of a whole answer: each prompt counts once, with its first choice's hits."""
    firsts = choices[::n]
    reasoning = [choice.reasoning for choice in choices if choice.reasoning is not None]
    return Usage(
        prompt=sum(len(choice.prompt) for choice in firsts),
        completion=sum(choice.tokens for choice in choices),
        cached=sum(choice.cached for choice in firsts),
        reasoning=sum(reasoning) if reasoning else None,
    )


def choice_usage(choice: Choice) -> Usage:
    return Usage(len(choice.prompt), choice.tokens, choice.cached, choice.reasoning)


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
