"""The route that lists positional encodings: what they do and cost, and what runs them here."""

from collections.abc import Sequence

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from ropewalk.model.catalogue import EncodingFacts, Place, as_json, catalogue, listing
from ropewalk.server.engine.openmp import aside
from ropewalk.server.openai.served_models import Models


def encoding_routes(models: Models, place: Place) -> APIRouter:
    """Lists this project's encodings, and others that a model is served with."""
    router = APIRouter()
    found: dict[frozenset[str], Sequence[EncodingFacts]] = {}  # by those that models have

    @router.get("/v1/encodings", response_model=None)
    async def encodings() -> Response:
        served = frozenset(one.encoding for one in models)
        if served not in found:
            found[served] = await aside(catalogue, place, sorted(served))
        data = [
            {**as_json(entry), "models": _served_with(models, entry)} for entry in found[served]
        ]
        return JSONResponse(listing(place, data))

    return router


def _served_with(models: Models, entry: EncodingFacts) -> list[str]:
    return [served.name for served in models if served.encoding == entry.name]
