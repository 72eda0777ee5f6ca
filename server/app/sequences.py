"""What the routes for kept sequences do. Imported when one of them is first asked."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ropewalk.cache.types import Op, OpReport
from ropewalk.model.config import Pooling
from ropewalk.server.app.cache import CachePlanner
from ropewalk.server.app.openai import EngineResponse, Serving, require_operator
from ropewalk.server.engine.engine import Engine
from ropewalk.server.engine.kept_cache import KeptDetails, Operated, changed_blocks
from ropewalk.server.errors import InvalidField, PromptTooLong, SequenceNotFound, UnsupportedField
from ropewalk.server.http.door import Visit
from ropewalk.server.http.middleware import state_of
from ropewalk.server.http.streaming import EventStream
from ropewalk.server.long_work import json_bytes
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.kept_bodies import KeepBody, OperationBody
from ropewalk.server.openai.requests import (
    check_ids,
    check_prompt,
    combined_salt,
    encode,
    greedy_request,
    require_decoder,
)
from ropewalk.server.openai.schemas import CachePlanBody
from ropewalk.server.openai.served_models import Served
from ropewalk.server.scheduling.kept import NOT_KEPT, Asked, Kept, new_id
from ropewalk.server.scheduling.request import Request as EngineRequest


class Computed(EngineResponse):
    """What `work` returns, which asks the engine, as JSON."""

    def __init__(
        self, serving: Serving, model: str, work: Callable[[], Awaitable[dict[str, object]]]
    ) -> None:
        super().__init__(serving, model, ())
        self._work = work

    async def _run(self, out: EventStream, visit: Visit | None) -> None:
        content = await self._work()
        await out.whole(await asyncio.to_thread(json_bytes, content))  # many blocks may be in it


class Sequences:
    """Answers requests for the kept sequences of all models. `planners`: by model."""

    def __init__(self, serving: Serving, planners: Mapping[str, CachePlanner]) -> None:
        self._serving = serving
        self._planners = planners

    async def keep(self, request: Request) -> Response:
        """Compute a prompt, or the continuation of a kept sequence, and keep it."""
        body = await body_of(request, KeepBody)
        require_operator(self._serving.options)
        served = await self._serving.find(request, body.model)
        require_decoder(served, "model")
        state = state_of(request.scope)
        origin, salt = None, combined_salt(state.get("salt", ""), body.cache_salt)
        if body.parent is not None:
            if body.cache_salt is not None:
                raise UnsupportedField(
                    "cache_salt cannot be combined with parent, which has its own; leave it out",
                    "cache_salt",
                )
            origin = await self._serving.continued(request, served.name, body.parent)
            salt = origin.salt
        bos = body.add_special_tokens and origin is None
        tokens = await prompt_tokens(body.prompt, served, bos=bos)
        if origin is not None:
            tokens = [*origin.tokens, *tokens]
        check_prompt(tokens, served, "prompt", answered=False)
        keeping = _keeping(
            tokens, new_id(), _client(request), salt, origin=origin, priority=body.priority
        )

        async def work() -> dict[str, object]:
            await self._run(served.name, keeping)
            view = await self._look(request, served.name, keeping.keep)
            return {**described(served.name, view), "cached_tokens": keeping.cached}

        return Computed(self._serving, served.name, work)

    async def all(self, request: Request, model: str | None) -> Response:
        """Those of all models or of one, without their checksums."""
        client, data = _client(request), []
        for served in await self._serving.chosen(request, model):
            views = await self._serving.ask(served.name, lambda engine: engine.kept.views(client))
            data += [described(served.name, view) for view in views]
        return JSONResponse({"object": "list", "data": data})

    async def one(self, request: Request, id_: str, model: str | None) -> Response:
        """With the checksums of its full blocks."""
        name = await self._model(request, id_, model)

        async def work() -> dict[str, object]:
            return described(name, await self._look(request, name, id_))

        return Computed(self._serving, name, work)

    async def drop(self, request: Request, id_: str, model: str | None) -> Response:
        """Give up what it alone holds."""
        require_operator(self._serving.options)
        name, client = await self._model(request, id_, model), _client(request)
        await self._serving.ask(name, lambda engine: engine.kept.drop(id_, client), changes=True)
        return JSONResponse({"id": id_, "object": "cache.sequence.deleted", "deleted": True})

    async def operate(self, request: Request, id_: str, model: str | None) -> Response:
        """Change it, or make another of it."""
        body = await body_of(request, OperationBody)
        require_operator(self._serving.options)
        name, client = await self._model(request, id_, model), _client(request)
        if body.operation == "append":
            served = await self._serving.find(request, name)
            return Computed(self._serving, name, lambda: self._appended(request, served, id_, body))
        planner = self._planners[name]

        def apply(engine: Engine) -> Operated:
            lengths = {"tokens": engine.kept.stored(id_, client)}
            if body.onto is not None:
                lengths["offset"] = engine.kept.stored(body.onto, client)
                _require_full(lengths["offset"], planner.block_size)
            spans = body.model_dump(include={"operation", "first", "count"}, exclude_none=True)
            planner.question(CachePlanBody.model_validate(spans | lengths))
            asked = Asked(
                Op(body.operation), body.first or 0, body.count or 0, onto=body.onto or ""
            )
            return engine.kept.apply(id_, client, asked)

        async def work() -> dict[str, object]:
            done = await self._serving.ask(name, apply, changes=True)
            happened = {
                **_counts(done.report),
                "should_change": done.report.should_change,
                "seconds": done.seconds,
            }
            predicted = {
                "capability": done.predicted.capability.value,
                "reason": None,
                **_counts(done.predicted),
            }
            return _answer(name, body, predicted, happened, done.before, done.after, done.changed)

        return Computed(self._serving, name, work)

    async def _appended(
        self, request: Request, served: Served, id_: str, body: OperationBody
    ) -> dict[str, object]:
        """Tokens that were sent, or that the model chose: then they are computed twice, first on a
        copy, since what is kept must not be written again."""
        name, client = served.name, _client(request)

        def look(engine: Engine) -> KeptDetails:
            engine.kept.sequences.to_continue(id_, client)
            return engine.kept.view(id_, client)

        before = await self._serving.ask(name, look)
        began, kept = time.perf_counter(), before.kept
        if body.prompt is not None:
            more = await prompt_tokens(body.prompt, served, bos=False)
        else:
            more = await self._chosen(served, kept, body.count or 1)
        tokens = [*kept.tokens, *more]
        check_prompt(tokens, served, "prompt", answered=False)
        await self._run(name, _keeping(tokens, id_, client, kept.salt, origin=kept))
        seconds = time.perf_counter() - began
        after = await self._look(request, name, id_)
        full = before.stored.computed // self._planners[name].block_size
        changed = changed_blocks(before.sums[:full], after)
        # An answer's last token was not stored before.
        written = self._planners[name].entries_per_token * (len(tokens) - before.stored.computed)
        nothing = {"copied_entries": 0, "rewritten_entries": 0, "bytes_moved": 0}
        predicted = {"capability": "free", "reason": None, **nothing, "written_entries": written}
        happened = {**nothing, "should_change": 0, "written_entries": written, "seconds": seconds}
        return _answer(name, body, predicted, happened, before, after, changed)

    async def _chosen(self, served: Served, kept: Kept, count: int) -> list[int]:
        """The most likely tokens after those of a kept sequence."""
        if count > served.room(len(kept.tokens)):
            raise PromptTooLong(
                f"{len(kept.tokens)} tokens are kept and {count} are to come, but the context of "
                f"{served.name} holds {served.max_context}; send a smaller count",
                "count",
            )
        continuing = greedy_request(
            [*kept.tokens], kept.client, kept.salt, max_tokens=count, origin=kept
        )
        return await self._run(served.name, continuing)

    async def _run(self, model: str, request: EngineRequest) -> list[int]:
        """The tokens that the engine adds to a request."""
        events = []
        async with aclosing(self._serving.engine.generate(model, [request])) as batches:
            async for batch in batches:
                events += [event for _, some in batch for event in some]
        for event in events:
            if event.error is not None:
                raise event.error
        return [event.token for event in events if event.token is not None]

    async def _model(self, request: Request, id_: str, model: str | None) -> str:
        """Which model has a sequence of that id. Raises SequenceNotFound."""
        chosen = [served.name for served in await self._serving.chosen(request, model)]
        if len(chosen) == 1:
            return chosen[0]
        client = _client(request)
        for name in chosen:
            with suppress(SequenceNotFound):
                await self._serving.ask(name, lambda engine: engine.kept.stored(id_, client))
                return name
        raise SequenceNotFound(NOT_KEPT)

    async def _look(self, request: Request, model: str, id_: str) -> KeptDetails:
        client = _client(request)
        return await self._serving.ask(model, lambda engine: engine.kept.view(id_, client))


async def prompt_tokens(prompt: str | list[int], served: Served, *, bos: bool) -> list[int]:
    """Raises PromptTooLong or InvalidField."""
    if isinstance(prompt, str):
        return await encode(prompt, served, bos=bos, param="prompt")
    check_ids(prompt, served, "prompt")
    return prompt


def _client(request: Request) -> str:
    client: str = state_of(request.scope).get("client", "")
    return client


def _keeping(tokens: list[int], id_: str, client: str, salt: str, **more: Any) -> EngineRequest:
    """A request that computes tokens, wants no answer, and is kept under that id."""
    pooling = Pooling.LAST  # as an embedding, of which nobody is told
    return greedy_request(tokens, client, salt, keep=id_, pooling=pooling, **more)


def _require_full(tokens: int, block_size: int) -> None:
    if tokens % block_size:
        raise InvalidField(
            f"onto has {tokens} tokens, so its last block of {block_size} is not full; truncate it "
            "or append to it first",
            "onto",
        )


def _counts(report: OpReport) -> dict[str, object]:
    return {
        "copied_entries": report.copied,
        "rewritten_entries": report.rewritten,
        "bytes_moved": report.bytes_moved,
    }


def _answer(
    model: str,
    body: OperationBody,
    predicted: Mapping[str, object],
    happened: Mapping[str, object],
    before: KeptDetails,
    after: KeptDetails,
    changed: Sequence[int],
) -> dict[str, object]:
    return {
        "object": "cache.operation",
        "operation": body.operation,
        "predicted": predicted,
        "happened": happened,
        "before": described(model, before),
        "after": described(model, after),
        "changed_blocks": [*changed],
    }


def described(model: str, view: KeptDetails) -> dict[str, object]:
    """A kept sequence as plain data."""
    kept, stored = view.kept, view.stored
    full = stored.computed // view.block_size
    sums = [total if index < full else None for index, total in enumerate(view.sums)]
    return {
        "id": kept.id,
        "object": "cache.sequence",
        "model": model,
        "tokens": len(kept.tokens),
        "computed_tokens": stored.computed,
        "blocks": [*stored.blocks],
        "bases": [*stored.bases],
        "checksums": sums or None,
        "created": int(kept.created),
        "expires_in": round(view.expires_in, 1),
    }
