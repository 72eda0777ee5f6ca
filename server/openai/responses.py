"""The wire format of answers: OpenAI's completion and chat objects, whole and in chunks.

The constant part of a chunk is built once per answer, because it is written for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Protocol

from ropewalk.server.errors import ServeError
from ropewalk.server.long_work import json_bytes, json_text
from ropewalk.server.openai.choice import Choice, Piece, Scored, Usage, special, spelled
from ropewalk.server.tools.parser import Delta

# Stands for minus infinity, which JSON lacks; float32 softmax gives no finite value this low.
LOWEST_LOGPROB = -9999.0
DONE = "data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip


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

    ping = PING

    def __init__(self, id_: str, kind: str, model: str, created: int, ids: TokenIds) -> None:
        self.ids = ids
        self.common = {"id": id_, "created": created, "model": model}
        head = (
            f'data: {{"id":{dumps(id_)},"object":{dumps(kind)},"created":{created},'
            f'"model":{dumps(model)},"choices":['
        )
        self.choice_head = head + '{"index":'
        self.usage_head = head + '],"usage":'

    def ending(self, usage: Usage | None) -> str:
        return DONE if usage is None else f"{self.usage_head}{dumps(usage.plain())}}}\n\n{DONE}"

    def failure(self, error: ServeError) -> str:
        return f"data: {error.body().decode()}\n\n"


class CompletionWire(_Frame):
    def __init__(self, id_: str, model: str, created: int, ids: TokenIds = NO_IDS) -> None:
        super().__init__(id_, "text_completion", model, created, ids)

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
            f"{_ending(piece)}{ids}}}]{usage}}}\n\n"
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
            }
        )

    def _ids_of(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if not self.ids.beside_text:
            return {}
        return {"prompt_token_ids": choice.prompt, "token_ids": piece.tokens}

    def _scores(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return _completion_scores(choice, piece, as_ids=self.ids.for_scored)


class ChatWire(_Frame):
    def __init__(self, id_: str, model: str, created: int, ids: TokenIds = NO_IDS) -> None:
        super().__init__(id_, "chat.completion.chunk", model, created, ids)

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
            f'{head}{dumps(last)},"logprobs":{scores},{_ending(piece)}{ids}}}]{usage}}}\n\n'
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
            }
        )

    def _scores(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return _chat_scores(choice, piece.scored, as_ids=self.ids.for_scored)


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


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _completion_scores(choice: Choice, piece: Piece, *, as_ids: bool) -> dict[str, Any]:
    """Four lists with one entry per token. Offsets count characters of the choice's text."""
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    left = len(piece.scored)
    for token, score in piece.scored:
        left -= 1
        text, offset = choice.spell(token, last=piece.finish is not None and left == 0)
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
            label = shown if other == token else _label(choice, other, as_ids)
            top.setdefault(label, _finite(logprob))
        top.setdefault(shown, _finite(score.logprob))
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def _chat_scores(choice: Choice, scored: Sequence[Scored], *, as_ids: bool) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        # Joined, the bytes are those of the text, to which a special token adds none.
        data = choice.tokenizer.token_bytes(token, first=False)
        return {
            "token": _label(choice, token, as_ids),
            "logprob": _finite(logprob),
            "bytes": None if special(choice.tokenizer, token) else list(data),
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


def _label(choice: Choice, token: int, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else spelled(choice.tokenizer, token)
