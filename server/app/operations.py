"""Routes that say how the server is and what it has, and that load models."""

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Protocol

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from ropewalk.model.catalogue import EncodingFacts, Place, as_json, catalogue, listing
from ropewalk.server.app.openai import Serving, accepts
from ropewalk.server.engine.openmp import Turns, aside
from ropewalk.server.errors import DeadlineExceeded, NotReady
from ropewalk.server.http.middleware import wants_page
from ropewalk.server.metrics.exporter import CONTENT_TYPES
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.schemas import ModelBody

# Pause between two families of metrics: without one every stream would stall for 10 ms per model.
# With 0 the engine's thread hardly gets to run.
_PAUSE_S = 0.001
_GZIP = 16 + zlib.MAX_WBITS  # zlib's way to ask for gzip's header


def operation_routes(serving: Serving, version: str, place: Place | None) -> APIRouter:
    """place: what /v1/encodings describes; without one that route does not exist."""
    router = APIRouter()
    listed: dict[frozenset[str], Sequence[EncodingFacts]] = {}  # by those that models have

    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """The process is up and the engine makes progress; says nothing about load."""
        _check_alive(serving)
        return JSONResponse({"status": "live"})

    async def ready() -> Response:
        """Send requests here: loaded, alive, sound and not shutting down."""
        _check_alive(serving)
        if serving.engine.unsound is not None:
            raise NotReady(serving.engine.unsound)
        if serving.drain.draining:
            raise serving.drain.refusal()
        return JSONResponse({"status": "ready"})

    router.add_api_route("/health/ready", ready, response_model=None)
    router.add_api_route("/health", ready, response_model=None)

    @router.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """In the format that is asked for, text or OpenMetrics, compressed if that is accepted."""
        accepted = request.headers.get("accept", "")
        openmetrics = _weight(accepted, "application/openmetrics-text") > _weight(
            accepted, "text/plain"
        )
        headers = {"content-type": CONTENT_TYPES[openmetrics], "vary": "accept, accept-encoding"}
        zipped = None
        if _weight(request.headers.get("accept-encoding", ""), "gzip") > 0:
            headers["content-encoding"] = "gzip"
            zipped = zlib.compressobj(wbits=_GZIP)
        parts = []
        for family in serving.metrics.render(openmetrics=openmetrics):
            parts.append(zipped.compress(family) if zipped else family)
            await asyncio.sleep(_PAUSE_S)
        if zipped:
            parts.append(zipped.flush())
        return Response(b"".join(parts), headers=headers)

    @router.get("/version", response_model=None)
    async def show_version() -> Response:
        """Of Ropewalk."""
        return JSONResponse({"version": version})

    def served_with(entry: EncodingFacts) -> list[str]:
        return [served.name for served in serving.models if served.encoding == entry.name]

    if place is not None:

        @router.get("/v1/encodings", response_model=None)
        async def encodings() -> Response:
            """Positional encodings: what they do and cost, and what runs them here."""
            served = frozenset(one.encoding for one in serving.models)
            if served not in listed:  # this project's, and others that a model is served with
                listed[served] = await aside(catalogue, place, sorted(served))
            data = [{**as_json(entry), "models": served_with(entry)} for entry in listed[served]]
            return JSONResponse(listing(place, data))

    @cache
    def found(app: FastAPI) -> tuple[bytes, str]:
        """Described when somebody asks: what it takes to do so is imported then."""
        from ropewalk.server.app.described import description

        names = list(serving.models.names)
        return description(app, names, with_key=bool(serving.options.api_keys))

    @router.get("/openapi.json", response_model=None)
    async def openapi(request: Request) -> Response:
        """This description, in OpenAPI."""
        data, _ = await asyncio.to_thread(found, request.app)
        return Response(data, media_type="application/json")

    @router.get("/docs", response_model=None, response_class=HTMLResponse)
    async def docs(request: Request) -> Response:
        """This description, as a page."""
        _, page = await asyncio.to_thread(found, request.app)
        return HTMLResponse(page)

    if serving.options.explorer:
        router.routes.append(_ForBrowsers("/", _explorer, include_in_schema=False))
    return router


class _ForBrowsers(APIRoute):
    """A route that others do not have."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if wants_page(scope) else (Match.NONE, {})


async def _explorer() -> Response:
    """A page that shows what each encoding does to a live cache."""
    html, headers = await asyncio.to_thread(_explorer_page)
    return HTMLResponse(html, headers=headers)


@cache
def _explorer_page() -> tuple[str, dict[str, str]]:
    from ropewalk.server.app.explorer import joined  # few clients are browsers

    return joined()


def position_routes(serving: Serving) -> APIRouter:
    """What they take is imported when somebody asks: few do."""
    router, turns = APIRouter(), Turns()
    positions = partial(import_module, "ropewalk.server.app.positions")

    async def beside(request: Request, compute: Callable[..., bytes], *of: object) -> Response:
        answer = await serving.awaited(request, turns.aside(compute, *of))
        return Response(answer, media_type="application/json")

    @router.post("/v1/positions/explain", **accepts("ExplainBody"))
    async def explain(request: Request) -> Response:
        """A query's attention scores in one layer, split into content and position."""
        found = await asyncio.to_thread(positions)
        body = await body_of(request, found.ExplainBody)
        served = await serving.find(request, body.model)
        return await beside(request, found.explained, body, served)

    @router.get("/v1/positions/audit", response_model=None)
    async def arms(request: Request, model: str | None = None) -> Response:
        """Encodings under which an audit can append to what a model has cached."""
        found = await asyncio.to_thread(positions)
        (served,) = await serving.chosen(request, serving.models.name(model))
        return await beside(request, found.arms, served)

    @router.post("/v1/positions/audit", **accepts("AuditBody"))
    async def audit(request: Request) -> Response:
        """What appending tokens does to the blocks before them, byte by byte."""
        found = await asyncio.to_thread(positions)
        body = await body_of(request, found.AuditBody)
        served = await serving.find(request, body.model)
        return await beside(request, found.audited, body, served)

    return router


class Loader(Protocol):
    """Loads and unloads models, by their own names: server/launch/registry.py."""

    async def load(self, name: str) -> None: ...
    async def unload(self, name: str) -> None: ...


def model_routes(serving: Serving, loader: Loader) -> APIRouter:
    router = APIRouter()

    async def load(request: Request) -> Response:
        """Loads a model, and answers when it is loaded."""
        return await changed(request, loader.load)

    async def unload(request: Request) -> Response:
        """Unloads a model once its requests have ended, and answers when its memory is free."""
        return await changed(request, loader.unload)

    async def changed(request: Request, change: Callable[[str], Awaitable[None]]) -> Response:
        body = await body_of(request, ModelBody)
        try:
            async with asyncio.timeout(serving.options.request_timeout_s):
                await change(serving.models.name(body.model))
        except TimeoutError:
            raise DeadlineExceeded(
                "this takes longer than a request may; GET /v1/models says when it is done"
            ) from None
        return JSONResponse({"success": True})

    for route in (load, unload):
        router.post(f"/v1/models/{route.__name__}", **accepts("ModelBody"))(route)
        # As llama.cpp's server has it.
        router.post(f"/models/{route.__name__}", include_in_schema=False)(route)
    return router


def _weight(header: str, name: str) -> float:
    """How much `name` is wanted, 0 to 1, by a header such as Accept. Knows no wildcards."""
    for entry in header.lower().split(","):
        value, *parameters = (part.strip() for part in entry.split(";"))
        if value == name:
            weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
            return float(weight) if re.fullmatch(r"[01](\.[0-9]{0,3})?", weight) else 0.0
    return 0.0


def _check_alive(serving: Serving) -> None:
    engine = serving.engine
    if not engine.alive:
        raise NotReady(engine.failure or "the engine is not making progress; restart the server")
