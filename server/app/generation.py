"""Sends one answer, from the first engine event to the last byte, streamed or whole.

Knows how an answer may end; server/openai/choice.py makes its content,
server/openai/responses.py its format.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from json import dumps

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine, Batch
from ropewalk.server.errors import (
    DeadlineExceeded,
    InternalError,
    RequestFailed,
    ServeError,
    ShuttingDown,
)
from ropewalk.server.http.middleware import state_of
from ropewalk.server.http.streaming import Drain, End, Ended, EventStream, Lifeline
from ropewalk.server.long_work import off_loop
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.choice import Choice, Piece, choice_usage, total_usage
from ropewalk.server.openai.responses import PING, Wire
from ropewalk.server.openai.schemas import StreamOptions
from ropewalk.server.scheduling.queue import Visit
from ropewalk.server.scheduling.request import FinishReason, Request

MANY = 1024  # tokens, which take milliseconds to serialise where they have scores

Batches = AsyncGenerator[Batch, None]

_log = logging.getLogger("ropewalk.http")


@dataclass(frozen=True, slots=True)
class Answer:
    """What to generate and in which format. `stream` None means one whole body."""

    model: str
    choices: Sequence[Choice]
    n: int
    wire: Wire
    stream: StreamOptions | None


class EngineResponse(Response):
    """What the engine computes, sent. Raises errors before the first byte, to become a status."""

    _ping = PING  # keeps an idle stream open

    def __init__(
        self,
        model: str,
        requests: Sequence[Request],
        engine: AsyncEngine,
        metrics: Metrics,
        drain: Drain,
        options: HttpOptions,
        n: int = 1,
    ) -> None:
        """n: how many of the requests are for each prompt."""
        super().__init__()
        self._model = model
        self._requests = requests
        self._n = n
        self._engine = engine
        self._metrics = metrics
        self._drain = drain
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options, model, state = self._options, self._model, state_of(scope)
        state["requests"], state["n"] = self._requests, self._n
        ping_s, stalled_s = options.ping_s, options.stalled_write_s
        lifeline = Lifeline(receive, options.request_timeout_s, self._drain)
        out = EventStream(send, lifeline, ping=self._ping, ping_s=ping_s, stalled_s=stalled_s)
        try:
            async with lifeline:
                await self._run(out, lifeline, send, state.get("visit"))
            return
        except Ended as ended:
            state["failure"] = ended.why.name.lower()
            if ended.why in (End.DISCONNECTED, End.STALLED):
                self._metrics.disconnected(model)
                _abort_connection(scope)
                return
            error = _cut_short(ended.why)
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
        self._metrics.stream_error(model)
        try:
            async with asyncio.timeout(stalled_s):
                await out.finish(self._failure(error).encode())
        except TimeoutError:
            _abort_connection(scope)

    async def _run(
        self, out: EventStream, lifeline: Lifeline, send: Send, visit: Visit | None
    ) -> None:
        """Compute, and send: events to `out`, or one body to `send`."""
        raise NotImplementedError

    def _failure(self, error: ServeError) -> str:
        """Events that end a stream in place of what it lacks."""
        raise NotImplementedError

    async def _send_whole(self, body: bytes, lifeline: Lifeline, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        lifeline.complete()


class Generation(EngineResponse):
    """Runs the engine for an Answer."""

    def __init__(
        self,
        answer: Answer,
        engine: AsyncEngine,
        metrics: Metrics,
        drain: Drain,
        options: HttpOptions,
    ) -> None:
        requests = [choice.request for choice in answer.choices]
        super().__init__(answer.model, requests, engine, metrics, drain, options, answer.n)
        self._answer = answer
        self._ping = answer.wire.ping

    def _failure(self, error: ServeError) -> str:
        return self._answer.wire.failure(error)

    async def _run(
        self, out: EventStream, lifeline: Lifeline, send: Send, visit: Visit | None
    ) -> None:
        answer = self._answer
        async with aclosing(self._engine.generate(answer.model, self._requests)) as batches:
            if answer.stream is None:
                await self._whole(batches, visit, lifeline, send)
            else:
                await self._streamed(batches, visit, out, answer.stream)

    def _take(self, batch: Batch, visit: Visit | None) -> list[tuple[Choice, Piece]]:
        """What these events add to their choices."""
        if visit is not None:
            visit.begin()
        pieces = []
        for index, events in batch:
            choice = self._answer.choices[index]
            pieces.append((choice, choice.take(events)))
            if choice.cut:  # the engine does not know why it is told to end
                choice.request.abort_as = FinishReason.STOP
                self._engine.abort(self._answer.model, choice.request)
        return pieces

    async def _streamed(
        self, batches: Batches, visit: Visit | None, out: EventStream, options: StreamOptions
    ) -> None:
        answer = self._answer
        wire, choices = answer.wire, answer.choices
        counted = options.include_usage and options.continuous_usage_stats
        async for batch in batches:
            events = []
            if not out.started:
                events.append(wire.opening(choices, _usage(choices[0]) if counted else ""))
            for choice, piece in self._take(batch, visit):
                write = partial(wire.chunk, choice, piece, _usage(choice) if counted else "")
                events.append(await off_loop(write, len(piece.scored), MANY))
            if all(choice.finished for choice in choices):
                break
            await out.write("".join(events).encode())
        else:
            raise no_end()
        used = total_usage(choices, answer.n) if options.include_usage else None
        events.append(wire.ending(used))
        await out.finish("".join(events).encode())

    async def _whole(
        self, batches: Batches, visit: Visit | None, lifeline: Lifeline, send: Send
    ) -> None:
        answer = self._answer
        choices = answer.choices
        parts: list[list[Piece]] = [[] for _ in choices]
        async for batch in batches:
            for choice, piece in self._take(batch, visit):
                parts[choice.index].append(piece)
            if all(choice.finished for choice in choices):
                break
        else:
            raise no_end()
        done = [(choice, _joined(parts[choice.index])) for choice in choices]
        usage = total_usage(choices, answer.n)

        def written() -> bytes:
            return answer.wire.whole(done, usage)

        size = sum(1 + len(piece.tokens) + len(piece.scored) for _, piece in done)
        await self._send_whole(await off_loop(written, size, MANY), lifeline, send)


def no_end() -> RequestFailed:
    return RequestFailed("the engine ended this request without a reason; send it again")


def _usage(choice: Choice) -> str:
    return f',"usage":{dumps(choice_usage(choice).plain())}'


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


def _cut_short(why: End) -> ServeError:
    if why is End.SHUTDOWN:
        return ShuttingDown()
    return DeadlineExceeded(
        "the request took longer than the server allows (--request-timeout); request fewer tokens"
    )


def _abort_connection(scope: Scope) -> None:
    """Drop what the client does not read; an orderly close would wait for it for ever."""
    abort = state_of(scope).get("abort")
    if abort is not None:
        abort()
