"""OpenAI's API: the routes, and how an answer is sent, from the body to the last byte.

server/openai makes requests of bodies, and what is sent of the engine's events. An answer is
streamed or whole; Serving is what all routes share.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from json import dumps
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine, Batch
from ropewalk.server.engine.engine import Engine
from ropewalk.server.errors import (
    DeadlineExceeded,
    InternalError,
    ModelNotLoaded,
    OperatorRoutesOff,
    RequestFailed,
    ServeError,
    ShuttingDown,
)
from ropewalk.server.http.door import Visit
from ropewalk.server.http.middleware import state_of
from ropewalk.server.http.streaming import Drain, End, Ended, EventStream, Lifeline
from ropewalk.server.long_work import off_loop
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.answers import (
    PING,
    ChatWire,
    Choice,
    CompletionWire,
    Piece,
    TokenIds,
    Wire,
    total_usage,
)
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.requests import (
    Prompt,
    chat_prompt,
    choices_for,
    combined_salt,
    compiled_grammar,
    completion_prompts,
)
from ropewalk.server.openai.schemas import ChatBody, CompletionBody, StreamOptions
from ropewalk.server.openai.served_models import Models, Served
from ropewalk.server.scheduling.kept import Kept
from ropewalk.server.scheduling.request import Request as EngineRequest

SCHEMAS = "#/components/schemas/"  # in /openapi.json
MANY_REQUESTS = 64  # which take milliseconds to make
MANY_TOKENS = 1024  # which take milliseconds to serialise where they have scores

Batches = AsyncGenerator[Batch, None]
T = TypeVar("T")

_log = logging.getLogger("ropewalk.http")


def accepts(body: str, *, streams: bool = False, required: bool = True) -> dict[str, Any]:
    """What a route that reads a body, of the class of that name, tells `router.post` of it."""
    schema = {"$ref": f"{SCHEMAS}{body}"}
    content = {"application/json": {"schema": schema}}
    events: dict[str, Any] = {"text/event-stream": {}} if streams else {}
    return {
        "response_model": None,
        "responses": {200: {"content": {"application/json": {}, **events}}},
        "openapi_extra": {"requestBody": {"required": required, "content": content}},
    }


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
        if self.models.get(own) is not None:
            return await self.models.hold(own, state["held"])
        # Who leaves meanwhile must not keep a place at the door.
        loading = self.models.hold(own, state["held"])
        return await self.awaited(request, loading, late="its model is being loaded: send it again")

    async def awaited(self, request: Request, work: Awaitable[T], late: str = "ask for less") -> T:
        """What it gives, unless the client leaves, time is over or the server must stop.

        late: what to do about it then.
        """
        try:
            async with Lifeline(request.receive, self.options.request_timeout_s, self.drain):
                return await work
        except Ended as ended:
            if ended.why is End.DISCONNECTED:
                raise ClientDisconnect from None
            raise _cut_short(ended.why, late) from None

    async def chosen(self, request: Request, name: str | None) -> list[Served]:
        """The model of that name, else all that are loaded."""
        if name is not None:
            own = self.models.name(name)
            if self.models.get(own) is None:  # to look at a cache must load nothing
                raise ModelNotLoaded(f"{own} is not loaded, so it has no cache", retry_after=None)
            return [await self.find(request, name)]
        held = state_of(request.scope)["held"]
        return [await self.models.hold(served.name, held) for served in list(self.models)]

    async def continued(self, request: Request, model: str, id_: str) -> Kept:
        """A kept sequence of who sent the request, after which tokens may come."""
        client = state_of(request.scope).get("client", "")
        return await self.ask(model, lambda engine: engine.kept.sequences.to_continue(id_, client))

    async def ask(self, model: str, question: Callable[[Engine], T], *, changes: bool = False) -> T:
        """As the engine's. Raises DeadlineExceeded besides, when it does not answer in time."""
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                return await self.engine.ask(model, question, changes=changes)
        except TimeoutError:
            raise DeadlineExceeded(
                "the engine is still busy with a step; try again later"
            ) from None

    async def answer(
        self,
        request: Request,
        body: CompletionBody | ChatBody,
        served: Served,
        prompts: Sequence[Prompt],
        wire: Wire,
    ) -> "Generation":
        if body.keep:
            require_operator(self.options)
        state = state_of(request.scope)
        salt = combined_salt(state.get("salt", ""), body.cache_salt)
        client = state.get("client", "")
        grammar = await compiled_grammar(body, prompts[0], served)
        make = partial(choices_for, body, prompts, served, salt, client, grammar)
        choices = await off_loop(make, len(prompts) * body.n, MANY_REQUESTS)
        stream = (body.stream_options or StreamOptions()) if body.stream else None
        return Generation(self, served.name, choices, body.n, wire, stream)


def openai_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", **accepts("CompletionBody", streams=True))
    async def completions(request: Request) -> Response:
        """Continues prompts, which are texts or token ids."""
        body = await body_of(request, CompletionBody)
        served = await serving.find(request, body.model)
        origin = None
        if body.sequence is not None:
            require_operator(serving.options)
            origin = await serving.continued(request, served.name, body.sequence)
        prompts = await completion_prompts(body, served, origin)
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


def require_operator(options: HttpOptions) -> None:
    """Raises OperatorRoutesOff where whoever can send requests may not change the cache."""
    if not options.operator_routes:
        raise OperatorRoutesOff(
            "this changes what the server's cache keeps, which --operator-routes does not allow "
            "here; start the server with --operator-routes on"
        )


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
    known = {
        "max_model_len": served.max_context,
        "encoding": served.encoding,
        "chat": served.chat_template is not None,
        "encoder_decoder": served.encoder_decoder is not None,
    }
    return {**served.details, **found, **known}


class EngineResponse(Response):
    """What the engine computes, sent. Raises errors before the first byte, to become a status."""

    _ping = PING  # keeps an idle stream open
    _ping_s: float | None = None  # None: as usual
    _seconds: float | None = None  # that it may take; None: what --request-timeout says

    def __init__(
        self,
        serving: Serving,
        model: str,
        requests: Sequence[EngineRequest],
        n: int = 1,
    ) -> None:
        """n: how many of the requests are for each prompt."""
        super().__init__()
        self._serving = serving
        self._model = model
        self._requests = requests
        self._n = n

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving, model, state = self._serving, self._model, state_of(scope)
        state["requests"], state["n"] = self._requests, self._n
        options = serving.options
        ping_s = options.ping_s if self._ping_s is None else self._ping_s
        seconds = options.request_timeout_s if self._seconds is None else self._seconds
        stalled_s = options.stalled_write_s
        lifeline = Lifeline(receive, seconds, serving.drain)
        out = EventStream(send, lifeline, ping=self._ping, ping_s=ping_s, stalled_s=stalled_s)
        try:
            async with lifeline:
                await self._run(out, state.get("visit"))
            return
        except Ended as ended:
            state["failure"] = ended.why.name.lower()
            if ended.why in (End.DISCONNECTED, End.STALLED):
                self._left()
                _abort_connection(scope)
                return
            error = _cut_short(ended.why, "request fewer tokens")
        except ServeError as refused:
            error = refused
            if isinstance(refused, RequestFailed):
                _log.error("request %s failed: %s", state["id"], refused.message)
        except Exception:
            # Even a bug must end the stream with an error that the client sees.
            _log.exception("request %s failed unexpectedly", state["id"])
            error = InternalError("the server failed on this request; see its log")
        finally:
            out.close()
        if not out.started:
            raise error
        state["failure"] = error.code
        serving.metrics.stream_error(model)
        try:
            async with asyncio.timeout(stalled_s):
                await out.finish(self._failure(error).encode())
        except TimeoutError:
            _abort_connection(scope)

    async def _run(self, out: EventStream, visit: Visit | None) -> None:
        """Compute, and send to `out`."""
        raise NotImplementedError

    def _failure(self, error: ServeError) -> str:
        """Events that end a stream in place of what it lacks."""
        raise NotImplementedError

    def _left(self) -> None:
        """The client has left before the end."""
        self._serving.metrics.disconnected(self._model)


class Generation(EngineResponse):
    """Runs the engine for choices, and writes them. `stream` None means one whole body."""

    def __init__(
        self,
        serving: Serving,
        model: str,
        choices: Sequence[Choice],
        n: int,
        wire: Wire,
        stream: StreamOptions | None,
    ) -> None:
        super().__init__(serving, model, [choice.request for choice in choices], n)
        self._choices = choices
        self._wire = wire
        self._stream = stream
        self._ping = wire.ping

    def _failure(self, error: ServeError) -> str:
        return self._wire.failure(error)

    async def _run(self, out: EventStream, visit: Visit | None) -> None:
        engine = self._serving.engine
        async with aclosing(engine.generate(self._model, self._requests)) as batches:
            if self._stream is None:
                await self._whole(batches, visit, out)
            else:
                await self._streamed(batches, visit, out, self._stream)

    def _take(self, batch: Batch, visit: Visit | None) -> list[tuple[Choice, Piece]]:
        """What these events add to their choices."""
        if visit is not None:
            visit.begin()
        pieces = []
        for index, events in batch:
            choice = self._choices[index]
            pieces.append((choice, choice.take(events)))
            if choice.cut:  # the engine does not know why it is told to end
                choice.request.stop_after(choice.tokens)
                self._serving.engine.abort(self._model, choice.request)
        return pieces

    async def _streamed(
        self, batches: Batches, visit: Visit | None, out: EventStream, options: StreamOptions
    ) -> None:
        wire, choices = self._wire, self._choices
        counted = options.include_usage and options.continuous_usage_stats
        out.begin_within(self._serving.options.first_ping_s)
        opened = False
        async for batch in batches:
            events, taken = [], self._take(batch, visit)
            if not opened:  # by now it is known how much of the prompt was cached
                events.append(wire.opening(choices, _usage(choices[0]) if counted else ""))
                opened = True
            for choice, piece in taken:
                write = partial(wire.chunk, choice, piece, _usage(choice) if counted else "")
                events.append(await off_loop(write, len(piece.scored), MANY_TOKENS))
            if all(choice.finished for choice in choices):
                break
            await out.write("".join(events).encode())
        else:
            raise no_end()
        used = total_usage(choices, self._n) if options.include_usage else None
        events.append(wire.ending(used))
        await out.finish("".join(events).encode())

    async def _whole(self, batches: Batches, visit: Visit | None, out: EventStream) -> None:
        choices = self._choices
        parts: list[list[Piece]] = [[] for _ in choices]
        async for batch in batches:
            for choice, piece in self._take(batch, visit):
                parts[choice.index].append(piece)
            if all(choice.finished for choice in choices):
                break
        else:
            raise no_end()
        done = [(choice, _joined(parts[choice.index])) for choice in choices]
        usage = total_usage(choices, self._n)

        def written() -> bytes:
            return self._wire.whole(done, usage)

        size = sum(1 + len(piece.tokens) + len(piece.scored) for _, piece in done)
        await out.whole(await off_loop(written, size, MANY_TOKENS))


def no_end() -> RequestFailed:
    return RequestFailed("the engine ended this request without a reason; send it again")


def _usage(choice: Choice) -> str:
    return f',"usage":{dumps(choice.usage.plain())}'


def _joined(pieces: Sequence[Piece]) -> Piece:
    last = pieces[-1]
    return Piece(
        first=True,
        text="".join(piece.text for piece in pieces),
        deltas=[delta for piece in pieces for delta in piece.deltas],
        tokens=[token for piece in pieces for token in piece.tokens],
        scored=[scored for piece in pieces for scored in piece.scored],
        finish=last.finish,
        stop_reason=last.stop_reason,
    )


def _cut_short(why: End, late: str) -> ServeError:
    if why is End.SHUTDOWN:
        return ShuttingDown()
    return DeadlineExceeded(
        f"the request took longer than the server allows (--request-timeout); {late}"
    )


def _abort_connection(scope: Scope) -> None:
    """Drop what the client does not read; an orderly close would wait for it for ever."""
    abort = state_of(scope).get("abort")
    if abort is not None:
        abort()
