"""Answers: choices, made of the engine's events, and OpenAI's objects and chunks, made of choices.

A choice knows tokens and text, and what a wire writes is bytes; neither knows HTTP. The constant
part of a chunk is built once per answer, because it is written for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, Protocol

from ropewalk.model.tokenizers.base import Detokenizer, StopText, Tokenizer
from ropewalk.server.errors import ServeError
from ropewalk.server.long_work import json_bytes, json_text
from ropewalk.server.openai.scores import Scored, Speller, chat_scores, completion_scores
from ropewalk.server.scheduling.request import FinishReason, Request, TokenEvent
from ropewalk.server.tools.parser import Delta, Parser

DONE = "data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip

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
    `reasoning` counts the tokens of reasoning; None without a parser. `speller` is there if tokens
    have scores.
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
        scored = request.params.logprobs is not None
        self.speller = Speller(tokenizer, first=alone) if scored else None
        self._echo = echo

    @property
    def usage(self) -> "Usage":
        return Usage(len(self.prompt), self.tokens, self.cached, self.reasoning)

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

    def _open(self, piece: Piece, event: TokenEvent) -> None:
        self.cached = event.cached_tokens
        piece.first = True
        piece.text += self._echo
        if event.prompt_logprobs is not None and self.speller is not None:
            piece.scored += zip(self.prompt, event.prompt_logprobs, strict=True)
            self.speller.echo(self._echo, self.prompt)

    def _add(self, piece: Piece, event: TokenEvent) -> None:
        if self._prompt_alone:
            self.finished, piece.finish = True, "length"
            return
        if event.token is not None:
            self.tokens += 1
            piece.tokens.append(event.token)
            if self.speller is not None:
                piece.scored.append((event.token, event.logprob))
            ends = event.finish is FinishReason.STOP
            ends = ends and event.token in self.request.params.stop_ids
            named = ends and event.token in self._stop_token_ids
            if named:
                piece.stop_reason = event.token
            if not ends or (named and self._include_stop):
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


class Wire(Protocol):
    ping: bytes  # keeps an idle stream open

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        """Events before the first token of an answer."""
        ...

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str: ...
    def ending(self, usage: Usage | None) -> str:
        """Events after the last token. `usage` None: the client did not ask for it."""
        ...

    def failure(self, error: ServeError) -> str:
        """Events that end a stream in place of what it lacks."""
        ...

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Where an answer has token ids, with vLLM's names for them."""

    beside_text: bool = False  # as prompt_token_ids and token_ids
    for_scored: bool = False  # "token_id:17" instead of the texts of tokens that have scores


NO_IDS = TokenIds()


class _Frame:
    """What every chunk of an answer repeats."""

    kind: str
    ping = PING

    def __init__(self, id_: str, model: str, created: int, ids: TokenIds = NO_IDS) -> None:
        self.ids = ids
        self.common = {"id": id_, "created": created, "model": model}
        head = (
            f'data: {{"id":{dumps(id_)},"object":{dumps(self.kind)},"created":{created},'
            f'"model":{dumps(model)},"choices":['
        )
        self.choice_head = head + '{"index":'
        self.usage_head = head + '],"usage":'

    def ending(self, usage: Usage | None) -> str:
        return DONE if usage is None else f"{self.usage_head}{dumps(usage.plain())}}}\n\n{DONE}"

    def failure(self, error: ServeError) -> str:
        return f"data: {error.body().decode()}\n\n"


class CompletionWire(_Frame):
    kind = "text_completion"

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        return ""

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str:
        scores = json_text(self._scores(choice, piece)) if piece.scored else "null"
        ids = ""
        if self.ids.beside_text:
            prompt = dumps(choice.prompt) if piece.first else "null"
            ids = f',"prompt_token_ids":{prompt},"token_ids":{dumps(piece.tokens)}'
        return (
            f'{self.choice_head}{choice.index},"text":{dumps(piece.text)},"logprobs":{scores},'
            f"{_ending(piece)}{ids}}}]{usage}{_kept_end(choice, piece)}}}\n\n"
        )

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> bytes:
        choices = [
            {
                "index": choice.index,
                "text": piece.text,
                "logprobs": self._scores(choice, piece) if piece.scored else None,
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
                **self._ids_of(choice, piece),
            }
            for choice, piece in done
        ]
        return json_bytes(
            {
                **self.common,
                "object": "text_completion",
                "choices": choices,
                "usage": usage.plain(),
                **_kept(done[0][0]),
            }
        )

    def _ids_of(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if not self.ids.beside_text:
            return {}
        return {"prompt_token_ids": choice.prompt, "token_ids": piece.tokens}

    def _scores(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        assert choice.speller is not None, "tokens with scores are spelled"
        ended, as_ids = piece.finish is not None, self.ids.for_scored
        return completion_scores(choice.speller, piece.scored, ended=ended, as_ids=as_ids)


class ChatWire(_Frame):
    kind = "chat.completion.chunk"

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        prompt = ""
        if self.ids.beside_text:
            prompt = f',"prompt_token_ids":{dumps(choices[0].prompt)}'
        return "".join(
            f'{self.choice_head}{choice.index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]{prompt}{usage}}}\n\n'
            for choice in choices
        )

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str:
        """One event for each delta; what goes with tokens comes with the last of them."""
        if choice.parsed:
            *parts, last = [_delta(delta) for delta in piece.deltas] or [{}]
            if not (last or piece.finish or piece.scored or self.ids.beside_text):
                return ""
        else:
            parts, last = [], {"content": piece.text}
        scores = json_text(self._scores(choice, piece)) if piece.scored else "null"
        ids = f',"token_ids":{dumps(piece.tokens)}' if self.ids.beside_text else ""
        head = f'{self.choice_head}{choice.index},"delta":'
        none = f'"logprobs":null,{_ending(Piece())}}}]{usage}}}\n\n'
        return "".join(f"{head}{dumps(part)},{none}" for part in parts) + (
            f'{head}{dumps(last)},"logprobs":{scores},{_ending(piece)}{ids}}}]{usage}'
            f"{_kept_end(choice, piece)}}}\n\n"
        )

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> bytes:
        choices = [
            {
                "index": choice.index,
                "message": _message(piece),
                "logprobs": self._scores(choice, piece) if piece.scored else None,
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
                **({"token_ids": piece.tokens} if self.ids.beside_text else {}),
            }
            for choice, piece in done
        ]
        prompt = {"prompt_token_ids": done[0][0].prompt} if self.ids.beside_text else {}
        return json_bytes(
            {
                **self.common,
                "object": "chat.completion",
                "choices": choices,
                "usage": usage.plain(),
                **prompt,
                **_kept(done[0][0]),
            }
        )

    def _scores(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return chat_scores(choice.tokenizer, piece.scored, as_ids=self.ids.for_scored)


def _kept(choice: Choice) -> dict[str, str]:
    """The id under which an answer is kept; only single ones are."""
    return {"sequence": choice.request.keep} if choice.request.keep else {}


def _kept_end(choice: Choice, piece: Piece) -> str:
    """The same behind the last chunk's choices."""
    if not (choice.request.keep and piece.finish):
        return ""
    return f',"sequence":{dumps(choice.request.keep)}'


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.content:
        return {"content": delta.content}
    if delta.reasoning:  # some clients read one name, some the other
        return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if not delta.name:
        return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.arguments}}]}
    function = {"name": delta.name, "arguments": ""}
    call = {"index": delta.call, "id": delta.id, "type": "function", "function": function}
    return {"tool_calls": [call]}


def _message(piece: Piece) -> dict[str, Any]:
    reasoning = "".join(delta.reasoning for delta in piece.deltas)
    calls: dict[int, dict[str, Any]] = {}
    for delta in piece.deltas:
        if delta.call is not None:
            function = {"name": delta.name, "arguments": ""}
            call = calls.setdefault(
                delta.call, {"id": delta.id, "type": "function", "function": function}
            )
            call["function"]["arguments"] += delta.arguments
    return {
        "role": "assistant",
        "content": None if calls and not piece.text else piece.text,
        **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
        **({"tool_calls": list(calls.values())} if calls else {}),
    }


def _ending(piece: Piece) -> str:
    if piece.finish is None:
        return '"finish_reason":null,"stop_reason":null'
    return f'"finish_reason":"{piece.finish}","stop_reason":{dumps(piece.stop_reason)}'
