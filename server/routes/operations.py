"""Routes for operators and their monitoring: health, metrics, version."""

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from server.http_errors import NotReady
from server.metrics import CONTENT_TYPE
from server.routes.openai import Serving

# Pause between two families of metrics: without one every stream would stall for 10 ms per model.
# With 0 the engine's thread hardly gets to run.
_PAUSE_S = 0.001


def operation_routes(serving: Serving, version: str) -> APIRouter:
    router = APIRouter()

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

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        families = []
        for family in serving.metrics.render():
            families.append(family)
            await asyncio.sleep(_PAUSE_S)
        return Response(b"".join(families), headers={"content-type": CONTENT_TYPE})

    @router.get("/version", response_model=None)
    async def show_version() -> Response:
        return JSONResponse({"version": version})

    return router


def _check_alive(serving: Serving) -> None:
    engine = serving.engine
    if not engine.alive:
        raise NotReady(engine.failure or "the engine is not making progress; restart the server")
