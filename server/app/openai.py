"""The routes of OpenAI's API: completions, chat completions and models."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ropewalk.server.app.described import accepts
from ropewalk.server.app.generation import Answer, Generation
from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.http.middleware import state_of
from ropewalk.server.http.streaming import Drain
from ropewalk.server.long_work import off_loop
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.requests import (
    Prompt,
    chat_prompt,
    choices_for,
    combined_salt,
    compiled_grammar,
    completion_prompts,
)
from ropewalk.server.openai.responses import ChatWire, CompletionWire, TokenIds, Wire
from ropewalk.server.openai.schemas import ChatBody, CompletionBody, StreamOptions
from ropewalk.server.openai.served_models import Models, Served

MANY = 64  # requests, which take milliseconds to make


@dataclass(frozen=True, slots=True)
class Serving:
    """What the routes share."""

    models: Models
    engine: AsyncEngine
    metrics: Metrics
    drain: Drain
    options: HttpOptions

    async def find(self, request: Request, name: str | None) -> Served:
        """The model of that name, loaded until the request is over.

        From here on, refusals are counted for it.
        """
        own = self.models.name(name)
        state = state_of(request.scope)
        state["model"] = own
        if "visit" in state:
            state["visit"].choose(own)
        return await self.models.hold(own, state["held"])

    async def chosen(self, request: Request, name: str | None) -> list[Served]:
        """The model of that name, else all that are loaded."""
        if name is not None:
            return [await self.find(request, name)]
        held = state_of(request.scope)["held"]
        return [await self.models.hold(served.name, held) for served in list(self.models)]

    async def answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        served: Served,
        prompts: Sequence[Prompt],
        wire: Wire,
    ) -> Generation:
        state = state_of(request.scope)
        salt = combined_salt(state.get("salt", ""), body.cache_salt)
        client = state.get("client", "")
        grammar = await compiled_grammar(body, prompts[0], served)
        make = partial(choices_for, body, prompts, served, salt, client, grammar)
        answer = Answer(
            model=served.name,
            choices=await off_loop(make, len(prompts) * body.n, MANY),
            n=body.n,
            wire=wire,
            stream=(body.stream_options or StreamOptions()) if body.stream else None,
        )
        return Generation(answer, self.engine, self.metrics, self.drain, self.options)


def openai_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", **accepts("CompletionBody", streams=True))
    async def completions(request: Request) -> Response:
        """Continues prompts, which are texts or token ids."""
        body = await body_of(request, CompletionBody)
        served = await serving.find(request, body.model)
        prompts = await completion_prompts(body, served)
        wire = CompletionWire(_id("cmpl"), served.name, int(time.time()), _token_ids(body))
        return await serving.answer(request, body, served, prompts, wire)

    @router.post("/v1/chat/completions", **accepts("ChatBody", streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answers a chat, in the model's own template."""
        body = await body_of(request, ChatBody)
        served = await serving.find(request, body.model)
        prompt = await chat_prompt(body, served)
        wire = ChatWire(_id("chatcmpl"), served.name, int(time.time()), _token_ids(body))
        return await serving.answer(request, body, served, [prompt], wire)

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        """What is served, under all its names."""
        data = [described(serving.models, name) for name in serving.models.names]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One of these."""
        return JSONResponse(described(serving.models, name))

    return router


def _id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _token_ids(body: CompletionBody | ChatBody) -> TokenIds:
    return TokenIds(beside_text=body.return_token_ids, for_scored=body.return_tokens_as_token_ids)


def described(models: Models, name: str) -> dict[str, object]:
    """A model under one of its names; `root` is the first of them. Raises ModelNotFound."""
    own = models.name(name)
    served = models.get(own)
    found = {
        "id": name,
        "object": "model",
        "created": models.created if served is None else served.created,
        "owned_by": "ropewalk",
        "root": own,
        "parent": None,
        "status": models.status(own),
    }
    if served is None:
        return found
    known = {"max_model_len": served.max_context, "encoding": served.encoding}
    return {**served.details, **found, **known}
