"""Routes to view and flush the caches, and to plan operations. Numbers only, no text."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ropewalk.cache.keeper import SpillCounts
from ropewalk.server.app.cache_plan import CachePlanner
from ropewalk.server.app.described import accepts
from ropewalk.server.app.openai import Serving
from ropewalk.server.engine.cache_view import CacheView, RequestView, SequenceView
from ropewalk.server.engine.openmp import aside
from ropewalk.server.errors import DeadlineExceeded
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.schemas import CachePlanBody
from ropewalk.server.openai.served_models import Served


def cache_routes(serving: Serving, planners: Mapping[str, CachePlanner]) -> APIRouter:
    """`planners`: one per model, by its name."""
    router = APIRouter()

    @router.get("/v1/cache", response_model=None)
    async def cache(request: Request, model: str | None = None) -> Response:
        """Blocks, sequences and sharing, as they are between two steps."""
        chosen = await serving.chosen(request, model)
        data = [
            described(served, planners[served.name], await _view(serving, served.name))
            for served in chosen
        ]
        return JSONResponse({"object": "list", "data": data})

    @router.post("/v1/cache/flush", response_model=None)
    async def flush(request: Request, model: str | None = None) -> Response:
        """Forgets every cached block that no request holds."""
        chosen = await serving.chosen(request, model)
        data = [
            {"model": served.name, "flushed_blocks": await _flushed(serving, served.name)}
            for served in chosen
        ]
        return JSONResponse({"object": "list", "data": data})

    @router.post("/v1/cache/plan", **accepts("CachePlanBody"))
    async def plan(request: Request) -> Response:
        """What an operation would cost, encoding by encoding, without touching any cache."""
        body = await body_of(request, CachePlanBody)
        served = await serving.find(request, body.model)
        planner = planners[served.name]
        question = planner.question(body)
        answer = await aside(planner.answer, question)
        return JSONResponse({"model": served.name, **answer})

    return router


async def _view(serving: Serving, model: str) -> CacheView:
    async with _patience(serving):
        return await serving.engine.cache_view(model)


async def _flushed(serving: Serving, model: str) -> int:
    async with _patience(serving):
        return await serving.engine.flush(model)


@asynccontextmanager
async def _patience(serving: Serving) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the engine does not answer in time."""
    try:
        async with asyncio.timeout(serving.options.request_timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the engine is still busy with a step; try again later") from None


def described(served: Served, planner: CachePlanner, view: CacheView) -> dict[str, object]:
    """One model's entry of /v1/cache, as plain data."""
    return {
        "model": served.name,
        "encoding": served.encoding,
        "key_frame": planner.key_frame.value,
        "block_size": planner.block_size,
        "bytes_per_token": planner.bytes_per_token,
        "max_context": served.max_context,
        "blocks": asdict(view.blocks),
        "audit": {**asdict(view.audit), "mode": view.audit.mode.value},
        "spill": _spill(view.spill),
        "waiting": view.waiting,
        "requests": [_request(request) for request in view.running],
        "shared": [
            {"block": block, "holders": list(names)} for block, names in view.shared.items()
        ],
    }


def _spill(spill: SpillCounts) -> dict[str, int]:
    return {
        "blocks": spill.free + spill.waiting + spill.cached,
        "free": spill.free,
        "waiting": spill.waiting,
        "cached": spill.cached,
        **asdict(spill.moves),
    }


def _request(request: RequestView) -> dict[str, object]:
    return {
        "id": request.id,
        "known_tokens": request.known,
        "dropped_tokens": request.dropped,
        "overflow": request.overflow.value,
        **_sequence(request.stored),
        "source": None if request.source is None else _sequence(request.source),
    }


def _sequence(sequence: SequenceView) -> dict[str, object]:
    return {
        "computed_tokens": sequence.computed,
        "blocks": list(sequence.blocks),
        "bases": list(sequence.bases),
    }
