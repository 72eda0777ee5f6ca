"""The routes of other APIs, which are chat's behind a translator."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ropewalk.server.app.openai import Serving
from ropewalk.server.long_work import off_loop
from ropewalk.server.openai.body import body_of, read_body
from ropewalk.server.openai.requests import chat_prompt
from ropewalk.server.openai.schemas import ChatBody

if TYPE_CHECKING:
    from ropewalk.server.translators.base import Translator

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

    @router.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        return await answer(request, (await load("responses")).TRANSLATOR)

    @router.post("/v1/messages", response_model=None)
    async def messages(request: Request) -> Response:
        return await answer(request, (await load("messages")).TRANSLATOR)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        api = (await load("messages")).COUNTER
        body = await body_of(request, api.body)
        served = serving.find(request, body.model)
        with api.renamed():
            chat = await _beside(request, lambda: read_body(ChatBody, body.chat()))
            prompt = await chat_prompt(chat, served)
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    async def answer(request: Request, api: "Translator") -> Response:
        body = await body_of(request, api.body)
        served = serving.find(request, body.model)
        with api.renamed():
            chat = await _beside(request, lambda: read_body(ChatBody, body.chat()))
            prompt = await chat_prompt(chat, served)
            chat = body.fitted(chat, served.room(len(prompt.tokens)))
            wire = await _beside(request, lambda: api.wire(body, chat, served.name))
            return await serving.answer(request, chat, served, [prompt], wire)

    return router


async def _beside(request: Request, work: Callable[[], T]) -> T:
    """The result, computed in a thread where the request is long."""
    return await off_loop(work, len(await request.body()))
