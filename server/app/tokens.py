"""Routes between text and tokens, without running a model."""

from fastapi import APIRouter, Request, Response

from ropewalk.model.tokenizers.base import decode
from ropewalk.server.app.openai import Serving, accepts
from ropewalk.server.errors import InvalidField, MissingField
from ropewalk.server.long_work import LONG_LIST, json_bytes, off_loop
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.requests import chat_text, check_ids, encode
from ropewalk.server.openai.schemas import DetokenizeBody, TokenizeBody
from ropewalk.server.openai.scores import spelled
from ropewalk.server.openai.served_models import Served


def token_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", **accepts("TokenizeBody"))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a chat in the model's template."""
        body = await body_of(request, TokenizeBody)
        served = await serving.find(request, body.model)
        tokens = await _tokens(body, served)

        def answer() -> bytes:
            strings = None
            if body.return_token_strs:
                strings = [
                    spelled(served.tokenizer, token, first=index == 0)
                    for index, token in enumerate(tokens)
                ]
            return json_bytes(
                {
                    "tokens": tokens,
                    "count": len(tokens),
                    "max_model_len": served.max_context,
                    "token_strs": strings,
                }
            )

        return _json(await off_loop(answer, len(tokens), LONG_LIST))

    @router.post("/detokenize", **accepts("DetokenizeBody"))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await body_of(request, DetokenizeBody)
        served = await serving.find(request, body.model)
        # Ids that the model does not embed have a text too.
        check_ids(body.tokens, served, "tokens", vocab_size=served.tokenizer.vocab_size)

        def answer() -> bytes:
            return json_bytes({"prompt": decode(served.tokenizer, body.tokens)})

        return _json(await off_loop(answer, len(body.tokens), LONG_LIST))

    return router


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


async def _tokens(body: TokenizeBody, served: Served) -> list[int]:
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if not given:
        raise MissingField("prompt is missing; send prompt or messages", "prompt")
    if len(given) > 1:
        raise InvalidField(f"{given[0]} and {given[1]} are both given; send one", given[1])
    if body.messages is not None:
        text = await chat_text(body, body.messages, served)
        return await encode(text, served, bos=bool(body.add_special_tokens), param="messages")
    plain = (body.text if body.prompt is None else body.prompt) or ""
    return await encode(plain, served, bos=body.add_special_tokens is not False, param=given[0])
