"""The routes of other APIs, which are chat's behind a translator."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ropewalk.server.app.openai import Serving, accepts
from ropewalk.server.long_work import off_loop
from ropewalk.server.openai.body import LONG, parse_object, read_body
from ropewalk.server.openai.requests import chat_prompt
from ropewalk.server.openai.schemas import ChatBody
from ropewalk.server.openai.served_models import Served

if TYPE_CHECKING:
    from ropewalk.server.translators.base import TranslatedBody, Translator

T = TypeVar("T")


def translated_routes(serving: Serving) -> APIRouter:
    router = APIRouter()
    loaded: dict[str, ModuleType] = {}

    async def load(name: str) -> ModuleType:
        """A translator, when it is first asked for: its import takes tens of milliseconds."""
        if name not in loaded:
            path = f"ropewalk.server.translators.{name}"
            loaded[name] = await asyncio.to_thread(import_module, path)
        return loaded[name]

    @router.post("/v1/responses", **accepts("ResponsesBody", streams=True))
    async def responses(request: Request) -> Response:
        """A chat as OpenAI's Responses API writes it."""
        return await answer(request, (await load("responses")).TRANSLATOR)

    @router.post("/v1/responses/input_tokens", **accepts("ResponsesBody"))
    async def input_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a chat has."""
        counted = await count(request, (await load("responses")).TRANSLATOR)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})

    @router.post("/v1/messages", **accepts("MessagesBody", streams=True))
    async def messages(request: Request) -> Response:
        """A chat as Anthropic's Messages API writes it."""
        return await answer(request, (await load("messages")).TRANSLATOR)

    @router.post("/v1/messages/count_tokens", **accepts("CountBody"))
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a chat has."""
        counted = await count(request, (await load("messages")).COUNTER)
        return JSONResponse({"input_tokens": counted})

    async def count(request: Request, api: "Translator") -> int:
        sent, body, served = await read(request, api)
        with api.renamed():
            chat = await _beside(request, lambda: read_body(ChatBody, body.chat(sent)))
            prompt = await chat_prompt(chat, served, fits=False)
        return len(prompt.tokens)

    async def answer(request: Request, api: "Translator") -> Response:
        sent, body, served = await read(request, api)
        with api.renamed():
            chat = await _beside(request, lambda: read_body(ChatBody, body.chat(sent)))
            prompt = await chat_prompt(chat, served)
            chat = body.fitted(chat, served.room(len(prompt.tokens)))
            wire = await _beside(request, lambda: api.wire(body, chat, served.name))
            return await serving.answer(request, chat, served, [prompt], wire)

    async def read(
        request: Request, api: "Translator"
    ) -> tuple[dict[str, Any], "TranslatedBody", Served]:
        """A body as it was sent, the same checked, and the model that it names."""
        data = await request.body()
        sent = await _beside(request, lambda: parse_object(data))
        body = await _beside(request, lambda: read_body(api.body, sent))
        return sent, body, await serving.find(request, body.model)

    return router


async def _beside(request: Request, work: Callable[[], T]) -> T:
    """The result, computed in a thread where the request is long."""
    return await off_loop(work, len(await request.body()), LONG)
