"""The route for embeddings: bodies to requests, and what the engine returns to answers."""

import uuid
from base64 import b64encode
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
from fastapi import APIRouter, Request, Response

from ropewalk.model.config import Pooling
from ropewalk.server.app.openai import EngineResponse, Serving, accepts, no_end
from ropewalk.server.errors import InvalidField, UnsupportedField
from ropewalk.server.http.door import Visit
from ropewalk.server.http.middleware import state_of
from ropewalk.server.http.streaming import EventStream
from ropewalk.server.long_work import json_bytes, off_loop
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.requests import (
    check_count,
    check_ids,
    check_prompt,
    combined_salt,
    each_of,
    encode_now,
    greedy_request,
)
from ropewalk.server.openai.schemas import EmbeddingBody
from ropewalk.server.openai.served_models import Served
from ropewalk.server.scheduling.request import Request as EngineRequest
from ropewalk.server.scheduling.request import Vector

MANY = 2048  # numbers, which take a millisecond or two to write


def embedding_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", **accepts("EmbeddingBody"))
    async def embeddings(request: Request) -> Response:
        """One vector for each input: of the last token or the mean of all, normalised."""
        body = await body_of(request, EmbeddingBody)
        served = await serving.find(request, body.model)
        state = state_of(request.scope)
        salt = combined_salt(state.get("salt", ""), body.cache_salt)
        requests = await embedding_requests(body, served, salt, state.get("client", ""))
        return Embeddings(serving, body, served, requests)

    return router


class Embeddings(EngineResponse):
    """Runs the engine for one vector per request."""

    def __init__(
        self,
        serving: Serving,
        body: EmbeddingBody,
        served: Served,
        requests: Sequence[EngineRequest],
    ) -> None:
        super().__init__(serving, served.name, requests)
        self._body = body
        self._served = served

    async def _run(self, out: EventStream, visit: Visit | None) -> None:
        found: dict[int, Vector] = {}
        engine = self._serving.engine
        async with aclosing(engine.generate(self._model, self._requests)) as batches:
            async for batch in batches:
                if visit is not None:
                    visit.begin()
                for index, (*_, last) in batch:
                    if last.error is not None:
                        raise last.error
                    if last.embedding is not None:
                        found[index] = last.embedding
        if len(found) < len(self._requests):
            raise no_end()
        vectors = [found[index] for index in range(len(found))]

        def written() -> bytes:
            return json_bytes(answer(self._requests, vectors, self._body, self._served))

        await out.whole(await off_loop(written, len(vectors) * len(vectors[0]), MANY))


async def embedding_requests(
    body: EmbeddingBody, served: Served, salt: str, client: str
) -> list[EngineRequest]:
    """One for each input. Raises InvalidField or a subclass."""
    if served.encoder_decoder is not None:
        raise UnsupportedField(
            f"{served.name} is an encoder-decoder, of which no embeddings are computed; use a "
            "decoder",
            "model",
        )
    why_not = served.embedding.why_not
    if why_not is not None and body.pooling is None:
        raise UnsupportedField(
            f"{served.name} {why_not}; its embeddings would be wrong, so choose a pooling yourself "
            "or use another model",
            "pooling",
        )
    if body.dimensions is not None and body.dimensions > served.hidden_size:
        raise InvalidField(
            f"dimensions is {body.dimensions}, but embeddings of {served.name} have "
            f"{served.hidden_size}; request at most that many",
            "dimensions",
        )
    check_count(len(body.inputs), "input", served)
    named = list(zip(each_of("input", len(body.inputs)), body.inputs, strict=True))
    inputs = await off_loop(
        lambda: [_tokens(param, given, body, served) for param, given in named],
        sum(map(len, body.inputs)),
    )
    group = uuid.uuid4().hex if len(inputs) > 1 else ""
    pooling = Pooling(body.pooling or served.embedding.pooling)
    return [
        greedy_request(tokens, client, salt, group=group, priority=body.priority, pooling=pooling)
        for tokens in inputs
    ]


def _tokens(param: str, given: str | list[int], body: EmbeddingBody, served: Served) -> list[int]:
    if isinstance(given, str):
        whole = body.add_special_tokens
        given = encode_now(given, served, bos=whole, param=param)
        given += served.tokenizer.ends if whole else ()
    else:
        check_ids(given, served, param)
    check_prompt(given, served, param, answered=False)
    return given


def answer(
    requests: Sequence[EngineRequest],
    vectors: Sequence[Vector],
    body: EmbeddingBody,
    served: Served,
) -> dict[str, object]:
    """vectors: the engine's, one for each request."""
    cached = sum(request.cached for request in requests)
    prompt = sum(request.num_prompt for request in requests)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _written(_finished(request, vector, body, served), body.encoding_format),
        }
        for index, (request, vector) in enumerate(zip(requests, vectors, strict=True))
    ]
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def _finished(request: EngineRequest, total: Vector, body: EmbeddingBody, served: Served) -> Vector:
    """Pooled, shortened, then normalised."""
    count = request.num_prompt if request.pooling is Pooling.MEAN else 1
    vector: Vector = total[: body.dimensions] / count
    if served.embedding.normalize:
        vector = vector / (float(np.linalg.norm(vector)) or 1.0)
    return vector


def _written(vector: Vector, form: str) -> str | list[float]:
    """As float32, like everyone's: numbers, or the base64 of their bytes, lowest first."""
    narrow = vector.astype("<f4")
    if form == "base64":
        return b64encode(narrow.tobytes()).decode()
    found: list[float] = narrow.tolist()
    return found
