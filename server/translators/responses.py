"""What chat generates as OpenAI's Responses write it: a response of items, and its typed events."""

import time
from collections.abc import Sequence
from json import dumps
from typing import Any

from ropewalk.server.errors import ServeError
from ropewalk.server.long_work import json_text
from ropewalk.server.openai.answers import Choice, Piece, Usage
from ropewalk.server.openai.schemas import ChatBody
from ropewalk.server.translators.base import Fields, Part, PartsWire, Translator, event, new_id
from ropewalk.server.translators.responses_body import NAMES, ResponsesBody

_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PART = {"reasoning": "reasoning_text", "text": "output_text"}


class ResponsesWire(PartsWire):
    def __init__(self, body: ResponsesBody, chat: ChatBody, model: str) -> None:
        super().__init__()
        choice = body.tool_choice
        self._said = 0  # events
        self._ids: list[str] = []  # of items
        # What every state of the response repeats, without the closing brace.
        self._head = json_text(
            {
                "id": new_id("resp"),
                "object": "response",
                "created_at": int(time.time()),
                "model": model,
                "background": False,
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "metadata": body.metadata,
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "previous_response_id": None,
                "reasoning": {"effort": body.reasoning.effort, "summary": None},
                "store": False,
                "temperature": chat.temperature,
                "text": {"format": body.text.format or {"type": "text"}},
                "tool_choice": (
                    choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)
                ),
                "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools],
                "top_p": chat.top_p,
                "truncation": "disabled",
            }
        )[:-1]

    def opening(self, choices: Sequence[Choice], usage: str) -> str:
        state = self._response("in_progress")
        return self._state("response.created", state) + self._state("response.in_progress", state)

    def opened(self, part: Part) -> str:
        self._ids.append(new_id(_PREFIX[part.kind]))
        item = self._item(part, "in_progress")
        if part.kind != "call":
            item["content"] = []
        said = self._event("response.output_item.added", self._at(part), item=item)
        if part.kind != "call":
            said += self._event(
                "response.content_part.added", self._within(part), part=_content(part)
            )
        return said

    def added(self, part: Part, delta: str) -> str:
        if part.kind == "call":
            return self._event(
                "response.function_call_arguments.delta", self._within(part), delta=delta
            )
        more: Fields = {"logprobs": []} if part.kind == "text" else {}
        kind = f"response.{_PART[part.kind]}.delta"
        return self._event(kind, self._within(part), delta=delta, **more)

    def closed(self, part: Part) -> str:
        within = self._within(part)
        if part.kind == "call":
            said = self._event(
                "response.function_call_arguments.done",
                within,
                name=part.first.name,
                arguments=part.text,
            )
        else:
            more: Fields = {"logprobs": []} if part.kind == "text" else {}
            kind = f"response.{_PART[part.kind]}.done"
            said = self._event(kind, within, text=part.text, **more)
            said += self._event("response.content_part.done", within, part=_content(part))
        item = self._item(part, self._ended(part))
        return said + self._event("response.output_item.done", self._at(part), item=item)

    def ending(self, usage: Usage | None) -> str:
        status = "incomplete" if self.finish == "length" else "completed"
        return self._state(f"response.{status}", self._response(status, usage))

    def failure(self, error: ServeError) -> str:
        head = "" if self._said else self.opening((), "")
        self.finish = "failed"
        return head + self._state("response.failed", self._response("failed", error=error))

    def whole(self, done: Sequence[tuple[Choice, Piece]], usage: Usage) -> bytes:
        self.gather(done)
        status = "incomplete" if self.finish == "length" else "completed"
        return self._response(status, usage).encode()

    def _response(
        self, status: str, usage: Usage | None = None, error: ServeError | None = None
    ) -> str:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        changing = {
            "status": status,
            "error": error and {"code": error.code, "message": error.message},
            "incomplete_details": cut,
            "output": [self._item(part, self._ended(part)) for part in self.parts],
            "usage": usage and _usage(usage),
        }
        return f"{self._head}, {dumps(changing)[1:]}"

    def _ended(self, part: Part) -> str:
        last = part is self.parts[-1]
        return "incomplete" if last and self.finish in ("length", "failed") else "completed"

    def _item(self, part: Part, status: str) -> Fields:
        item: Fields = {"id": self._ids[part.index], "status": status}
        match part.kind:
            case "text":
                more = {"type": "message", "role": "assistant", "content": [_content(part)]}
            case "reasoning":
                more = {"type": "reasoning", "summary": [], "content": [_content(part)]}
            case "call":
                more = {"type": "function_call", "call_id": part.first.id}
                more |= {"name": part.first.name, "arguments": part.text}
        return item | more

    def _at(self, part: Part) -> Fields:
        return {"output_index": part.index}

    def _within(self, part: Part) -> Fields:
        within = {"item_id": self._ids[part.index], "output_index": part.index}
        return within if part.kind == "call" else within | {"content_index": 0}

    def _event(self, kind: str, where: Fields, **fields: Any) -> str:
        self._said += 1
        return event(kind, {"sequence_number": self._said - 1, **where, **fields})

    def _state(self, kind: str, response: str) -> str:
        self._said += 1
        head = f'{{"type": "{kind}", "sequence_number": {self._said - 1}, "response": '
        return f"event: {kind}\ndata: {head}{response}}}\n\n"


def _content(part: Part) -> Fields:
    content: Fields = {"type": _PART[part.kind], "text": part.text}
    return content | ({"annotations": [], "logprobs": []} if part.kind == "text" else {})


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }


TRANSLATOR = Translator(ResponsesBody, NAMES, ResponsesWire)
