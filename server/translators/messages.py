"""What chat generates as Anthropic's Messages write it: a message of blocks, and its events."""

from collections.abc import Sequence
from json import dumps

from pydantic_core import from_json

from ropewalk.server.errors import ServeError
from ropewalk.server.openai.answers import Choice, Piece, Usage
from ropewalk.server.openai.schemas import AS_MANY_AS_FIT, ChatBody
from ropewalk.server.translators.base import Fields, Part, PartsWire, Translator, event, new_id
from ropewalk.server.translators.messages_body import NAMES, CountBody, MessagesBody


class MessagesWire(PartsWire):
    ping = event("ping", {}).encode()

    def __init__(self, body: CountBody, chat: ChatBody, model: str) -> None:
        super().__init__()
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model}
        self._cut = chat.wanted_tokens == AS_MANY_AS_FIT  # by the end of the context

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        so_far = _usage(choices[0].usage)
        empty: Fields = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": so_far}
        return event("message_start", {"message": {**self._head, **empty}})

    def opened(self, part: Part) -> str:
        block = _block(part)
        return event("content_block_start", {"index": part.index, "content_block": block})

    def added(self, part: Part, delta: str) -> str:
        match part.kind:
            case "text":
                change = {"type": "text_delta", "text": delta}
            case "reasoning":
                change = {"type": "thinking_delta", "thinking": delta}
            case "call":
                change = {"type": "input_json_delta", "partial_json": delta}
        return event("content_block_delta", {"index": part.index, "delta": change})

    def closed(self, part: Part) -> str:
        return event("content_block_stop", {"index": part.index})

    def ending(self, usage: Usage | None) -> str:
        assert usage is not None
        ended = {"delta": self._stop(), "usage": _usage(usage)}
        return event("message_delta", ended) + event("message_stop", {})

    def failure(self, error: ServeError) -> str:
        return f"event: error\ndata: {error.body('/v1/messages').decode()}\n\n"

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> bytes:
        self.gather(done)
        content = [_block(part) for part in self.parts]
        answer = {**self._head, "content": content, **self._stop(), "usage": _usage(usage)}
        return dumps(answer).encode()

    def _stop(self) -> Fields:
        reason, sequence = "end_turn", None
        if self.finish == "length":
            reason = "model_context_window_exceeded" if self._cut else "max_tokens"
        elif self.finish == "tool_calls":
            reason = "tool_use"
        elif isinstance(self.stop_reason, str):
            reason, sequence = "stop_sequence", self.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _block(part: Part) -> Fields:
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case "call":
            call = {"id": part.first.id, "name": part.first.name, "input": _input(part)}
            return {"type": "tool_use", **call}


def _input(part: Part) -> object:
    """A call's arguments as an object: what is complete of them, where the answer was cut."""
    try:
        found = from_json(part.text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


TRANSLATOR = Translator(MessagesBody, NAMES, MessagesWire)
COUNTER = Translator(CountBody, NAMES, MessagesWire)
