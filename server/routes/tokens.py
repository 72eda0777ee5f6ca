"""Routes between text and tokens, without running a model."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from model.tokenizers.base import decode
from server.http_errors import MissingField
from server.models import Served
from server.prepare import check_ids, encode, encode_chat
from server.request import InvalidField
from server.routes.bodies import body_of
from server.routes.openai import Serving
from server.schemas import DetokenizeBody, TokenizeBody
from server.spelling import spelled


def token_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        body = await body_of(request, TokenizeBody)
        served = serving.find(request, body.model)
        tokens = await _tokens(body, served)
        strings = [
            spelled(served.tokenizer, token, first=index == 0) for index, token in enumerate(tokens)
        ]
        return JSONResponse(
            {
                "tokens": tokens,
                "count": len(tokens),
                "max_model_len": served.max_context,
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        body = await body_of(request, DetokenizeBody)
        served = serving.find(request, body.model)
        # Ids that the model does not embed have a text too.
        check_ids(body.tokens, served, "tokens", vocab_size=served.tokenizer.vocab_size)
        return JSONResponse({"prompt": decode(served.tokenizer, body.tokens)})

    return router


async def _tokens(body: TokenizeBody, served: Served) -> list[int]:
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if not given:
        raise MissingField("prompt is missing; send prompt or messages", "prompt")
    if len(given) > 1:
        raise InvalidField(f"{given[0]} and {given[1]} are both given; send one", given[1])
    if body.messages is not None:
        return await encode_chat(
            body.messages,
            served,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.variables,
            bos=bool(body.add_special_tokens),
        )
    text = body.prompt if body.prompt is not None else body.text
    return await encode(
        text or "", served, bos=body.add_special_tokens is not False, param=given[0]
    )
