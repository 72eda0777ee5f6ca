"""The wire format of answers: OpenAI's completion and chat objects, whole and in chunks.

The constant part of a chunk is built once per answer, because it is written for every token.
"""

from collections.abc import Sequence
from json import dumps
from typing import Any, Protocol

from model.tokenizers.base import Tokenizer
from server.completion import Choice, Piece, Scored, Usage

# Stands for minus infinity, which JSON lacks; float32 softmax gives no finite value this low.
LOWEST_LOGPROB = -9999.0


class Wire(Protocol):
    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        """Events before the first token of an answer."""
        ...

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str: ...
    def usage_chunk(self, usage: Usage) -> str: ...
    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]: ...


class _Frame:
    """What every chunk of an answer repeats."""

    def __init__(self, id_: str, kind: str, model: str, created: int) -> None:
        self.common = {"id": id_, "created": created, "model": model}
        head = (
            f'data: {{"id":{dumps(id_)},"object":{dumps(kind)},"created":{created},'
            f'"model":{dumps(model)},"choices":['
        )
        self.choice_head = head + '{"index":'
        self.usage_head = head + '],"usage":'

    def usage_chunk(self, usage: Usage) -> str:
        return f"{self.usage_head}{dumps(usage.plain())}}}\n\n"


class CompletionWire(_Frame):
    def __init__(self, id_: str, model: str, created: int) -> None:
        super().__init__(id_, "text_completion", model, created)

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        return ""

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str:
        scores = dumps(_completion_scores(choice, piece.scored)) if piece.scored else "null"
        return (
            f'{self.choice_head}{choice.index},"text":{dumps(piece.text)},"logprobs":{scores},'
            f"{_ending(piece)}}}]{usage}}}\n\n"
        )

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "text": piece.text,
                "logprobs": _completion_scores(choice, piece.scored) if piece.scored else None,
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
            }
            for choice, piece in done
        ]
        return {
            **self.common,
            "object": "text_completion",
            "choices": choices,
            "usage": usage.plain(),
        }


class ChatWire(_Frame):
    def __init__(self, id_: str, model: str, created: int) -> None:
        super().__init__(id_, "chat.completion.chunk", model, created)

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        return "".join(
            f'{self.choice_head}{choice.index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'
            for choice in choices
        )

    def chunk(self, choice: Choice, piece: Piece, usage: str) -> str:
        scores = dumps(_chat_scores(choice.tokenizer, piece.scored)) if piece.scored else "null"
        return (
            f'{self.choice_head}{choice.index},"delta":{{"content":{dumps(piece.text)}}},'
            f'"logprobs":{scores},{_ending(piece)}}}]{usage}}}\n\n'
        )

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": piece.text},
                "logprobs": _chat_scores(choice.tokenizer, piece.scored) if piece.scored else None,
                "finish_reason": piece.finish,
                "stop_reason": piece.stop_reason,
            }
            for choice, piece in done
        ]
        return {
            **self.common,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage.plain(),
        }


def _ending(piece: Piece) -> str:
    if piece.finish is None:
        return '"finish_reason":null,"stop_reason":null'
    return f'"finish_reason":"{piece.finish}","stop_reason":{dumps(piece.stop_reason)}'


def spelled(tokenizer: Tokenizer, token: int, *, first: bool = False) -> str:
    """One token as text; bytes that are no character by themselves become U+FFFD."""
    return tokenizer.token_bytes(token, first=first).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _completion_scores(choice: Choice, scored: Sequence[Scored]) -> dict[str, Any]:
    """Four lists with one entry per token. Offsets count characters of the choice's text."""
    tokenizer = choice.tokenizer
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, score in scored:
        text, offset = choice.spell(token)
        tokens.append(text)
        offsets.append(offset)
        if score is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(_finite(score.logprob))
        top: dict[str, float] = {}
        for other, logprob in score.top:
            # Best first: of two tokens with the same spelling the likelier one stays.
            top.setdefault(spelled(tokenizer, other), _finite(logprob))
        top.setdefault(text, _finite(score.logprob))
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }


def _chat_scores(tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token, first=False)
        return {
            "token": data.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
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
