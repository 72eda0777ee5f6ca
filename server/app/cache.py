"""Routes to view and flush the caches, and to plan operations. Numbers only, no text.

What an operation on a context would cost is planned encoding by encoding, without touching any
cache. Counts come from the code that serves: a dry run on the bookkeeping of a cache that stores
only the context. Times are estimated from the time that a model's first steps took.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ropewalk.cache.keeper import SpillCounts
from ropewalk.cache.types import Evict, Fork, Move, Op, Operation, OpReport, Truncate
from ropewalk.model.catalogue import in_each_storage
from ropewalk.model.config import ModelConfig
from ropewalk.model.dry_run import OTHER, SEQUENCE, Trial
from ropewalk.model.encodings.base import (
    EncodingError,
    PositionalEncoding,
    find,
    names,
    stored_gates,
)
from ropewalk.server.app.openai import Serving, accepts
from ropewalk.server.engine.cache_view import CacheView, KeptView, RequestView, SequenceView
from ropewalk.server.engine.engine import Engine
from ropewalk.server.engine.openmp import aside
from ropewalk.server.engine.warm_up import Speed
from ropewalk.server.errors import InvalidField, MissingField
from ropewalk.server.hardware import dtype_name
from ropewalk.server.openai.body import body_of
from ropewalk.server.openai.schemas import CachePlanBody, FlushBody
from ropewalk.server.openai.served_models import Served

if TYPE_CHECKING:
    from ropewalk.server.app.sequences import Sequences
    from ropewalk.server.app.watching import Watch

_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
LIMITS = ("max_seqs", "max_step_tokens", "lone_factor")  # that the engine has for a step
RESTS_ON = (
    "seconds for one block over all layers, measured when the model was loaded: rotating its keys "
    "and copying its entries as part of a long run of blocks, and computing its tokens with none "
    "before them; estimates multiply these times, so they leave out bookkeeping, other requests' "
    "steps and the cost of attention to a longer context"
)
FIELDS: Mapping[Op, tuple[str, ...]] = {  # besides the operation, tokens and the model
    Op.APPEND: (),
    Op.FORK: ("count",),
    Op.TRUNCATE: ("count",),
    Op.EVICT_KEEP: ("first", "count"),
    Op.EVICT_RENUMBER: ("first", "count"),
    Op.MOVE_SPAN: ("first", "count", "offset"),
}


def cache_routes(serving: Serving, planners: Mapping[str, "CachePlanner"]) -> APIRouter:
    """`planners`: one per model, by its name."""
    router = APIRouter()

    @router.get("/v1/cache", response_model=None)
    async def cache(request: Request, model: str | None = None) -> Response:
        """Blocks, sequences and sharing, as they are between two steps."""
        chosen = await serving.chosen(request, model)
        data = [
            described(served, planners[served.name], await serving.ask(served.name, Engine.view))
            for served in chosen
        ]
        return JSONResponse({"object": "list", "data": data})

    watches: dict[str, Watch] = {}

    @router.get("/v1/cache/stream", response_model=None, responses=_EVENTS)
    async def stream(request: Request, model: str | None = None) -> Response:
        """The same as a stream: a snapshot, then what changes, for as long as somebody listens."""
        from ropewalk.server.app.watching import cache_stream

        return await cache_stream(serving, planners, watches, request, model)

    @router.post("/v1/cache/flush", **accepts("FlushBody", required=False))
    async def flush(request: Request, model: str | None = None) -> Response:
        """Forgets every cached block that no request holds."""
        if await request.body():
            named = (await body_of(request, FlushBody)).model
            model = model if named is None else named
        chosen = await serving.chosen(request, model)
        data = []
        for served in chosen:
            flushed = await serving.ask(served.name, Engine.flush, changes=True)
            data.append({"model": served.name, "flushed_blocks": flushed})
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

    sequences: list[Sequences] = []

    async def kept() -> "Sequences":
        """Imported when it is first asked for, by few servers."""
        if not sequences:
            module = await asyncio.to_thread(import_module, "ropewalk.server.app.sequences")
            sequences.append(module.Sequences(serving, planners))
        return sequences[0]

    path = "/v1/cache/sequences"

    @router.post(path, **accepts("KeepBody"))
    async def keep(request: Request) -> Response:
        """Computes a prompt and keeps its entries in the cache, under an id."""
        return await (await kept()).keep(request)

    @router.get(path, response_model=None)
    async def sequences_kept(request: Request, model: str | None = None) -> Response:
        """Kept sequences: their blocks, their positions, and when they expire."""
        return await (await kept()).all(request, model)

    @router.get(f"{path}/{{id}}", response_model=None)
    async def sequence(request: Request, id: str, model: str | None = None) -> Response:
        """One of them, with a checksum of each of its full blocks."""
        return await (await kept()).one(request, id, model)

    @router.delete(f"{path}/{{id}}", response_model=None)
    async def drop(request: Request, id: str, model: str | None = None) -> Response:
        """Gives up a kept sequence."""
        return await (await kept()).drop(request, id, model)

    @router.post(f"{path}/{{id}}/operations", **accepts("OperationBody"))
    async def operate(request: Request, id: str, model: str | None = None) -> Response:
        """Appends to a kept sequence, forks or shortens it, or moves a part; and what that took."""
        return await (await kept()).operate(request, id, model)

    return router


def described(served: Served, planner: "CachePlanner", view: CacheView) -> dict[str, object]:
    """One model's entry of /v1/cache, as plain data."""
    return {
        "model": served.name,
        "encoding": served.encoding,
        "key_storage": planner.key_storage.value,
        "block_size": planner.block_size,
        "bytes_per_token": planner.bytes_per_token,
        "max_context": served.max_context,
        "limits": {name: getattr(view.limits, name) for name in LIMITS},
        **counts(view),
        "requests": [described_request(request) for request in view.running],
        "kept": [described_kept(kept) for kept in view.kept],
        "shared": shared(view),
    }


def counts(view: CacheView) -> dict[str, object]:
    """What an entry says of the cache as a whole."""
    return {
        "blocks": asdict(view.blocks),
        "audit": {**asdict(view.audit), "mode": view.audit.mode.value},
        "spill": _spill(view.spill),
        "waiting": view.waiting,
    }


def shared(view: CacheView) -> list[dict[str, object]]:
    return [{"block": block, "holders": list(names)} for block, names in view.shared.items()]


def _spill(spill: SpillCounts) -> dict[str, int]:
    return {
        "blocks": spill.free + spill.waiting + spill.cached,
        "free": spill.free,
        "waiting": spill.waiting,
        "cached": spill.cached,
        **asdict(spill.moves),
    }


def described_request(request: RequestView) -> dict[str, object]:
    return {
        "id": request.id,
        "known_tokens": request.known,
        "dropped_tokens": request.dropped,
        "overflow": request.overflow.value,
        **_sequence(request.stored),
        "source": None if request.source is None else _sequence(request.source),
    }


def described_kept(kept: KeptView) -> dict[str, object]:
    return {"id": kept.id, "known_tokens": kept.known, **_sequence(kept.stored)}


def _sequence(sequence: SequenceView) -> dict[str, object]:
    return {
        "computed_tokens": sequence.computed,
        "blocks": list(sequence.blocks),
        "bases": list(sequence.bases),
    }


@dataclass(frozen=True, slots=True)
class Question:
    """An operation on a context of `tokens` stored tokens.

    Evictions drop `count` tokens from `first` on; a move appends them to another sequence, which
    has `offset` tokens; a fork shares, and a truncation keeps, the first `count`.
    """

    op: Op
    tokens: int
    first: int = 0
    count: int = 0
    offset: int = 0

    @property
    def leaves_context(self) -> bool:
        """Whether entries remain that were computed among other tokens than they then have."""
        drops = self.op in (Op.EVICT_KEEP, Op.EVICT_RENUMBER)
        return self.op is Op.MOVE_SPAN or (drops and self.first + self.count < self.tokens)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An encoding that the model could have; `own` is the one that it has."""

    name: str
    encoding: PositionalEncoding
    own: bool


class CachePlanner:
    """Plans for one model. Touches only what it makes itself, so any thread may call it."""

    def __init__(
        self,
        shape: ModelConfig,
        encoding: PositionalEncoding,
        *,
        dtype: torch.dtype,
        block_size: int,
        max_context: int,
        speed: Speed,
    ) -> None:
        self.key_storage = encoding.key_storage
        self.block_size = block_size
        self._shape = shape
        self._dtype = dtype
        self._max_context = max_context
        self._speed = speed
        self._gates = stored_gates(encoding, shape)
        self._own = Candidate(shape.encoding.name, encoding, own=True)
        kv = self._trial({}).kv
        self.bytes_per_token, self.entries_per_token = kv.bytes_per_token, kv.entries_per_token

    @cached_property
    def _candidates(self) -> list[Candidate]:
        """Found when they are first asked for: that imports every encoding there is."""
        return [self._own, *_others(self._shape)]

    def question(self, body: CachePlanBody) -> Question:
        """Raises MissingField or InvalidField for a body that does not fit its operation."""
        op = Op(body.operation)
        given = {"first": body.first, "count": body.count, "offset": body.offset}
        for name, value in given.items():
            if value is None and name in FIELDS[op]:
                raise MissingField(f"{name} is missing; {op.value} needs it", name)
            if value is not None and name not in FIELDS[op]:
                raise InvalidField(f"{name} does not apply to {op.value}; leave it out", name)
        told = {name: value for name, value in given.items() if value is not None}
        question = Question(op, body.tokens, **told)
        self._check_context(question)
        if op in (Op.FORK, Op.TRUNCATE):
            if question.count > question.tokens:
                raise InvalidField(
                    f"count is {question.count}, but the context has only {question.tokens} "
                    "tokens; send at most that many",
                    "count",
                )
        elif op is not Op.APPEND:
            self._check_span(question)
        return question

    def answer(self, question: Question) -> dict[str, object]:
        """Takes time in proportion to the blocks, so do not call it on the event loop."""
        trial = self._trial(_lengths(question))
        estimate = self._costs_of_appending if question.op is Op.APPEND else self._costs
        return {
            "object": "cache.plan",
            "operation": question.op.value,
            "tokens": question.tokens,
            **{name: getattr(question, name) for name in FIELDS[question.op]},
            "block_size": self.block_size,
            "bytes_per_token": self.bytes_per_token,
            "dtype": dtype_name(self._dtype),
            "context_error": question.leaves_context,
            "measured": {**asdict(self._speed), "rests_on": RESTS_ON},
            "data": [
                {
                    "encoding": candidate.name,
                    "key_storage": candidate.encoding.key_storage.value,
                    "own": candidate.own,
                    **estimate(question, candidate, trial),
                }
                for candidate in self._candidates
            ],
        }

    def _costs(self, question: Question, candidate: Candidate, trial: Trial) -> dict[str, object]:
        operations = trial.operations(candidate.encoding)
        capability, reason = operations.capability(question.op), operations.why_not(question.op)
        report = None if reason else operations.dry_run(self._operation(question))
        return {
            "capability": capability.value,
            "reason": reason,
            "copied_entries": report and report.copied,
            "rewritten_entries": report and report.rewritten,
            "bytes_moved": report and report.bytes_moved,
            "estimated_seconds": report and self._seconds(report, trial),
            "recompute": None if report else self._recompute(question),
        }

    def _costs_of_appending(
        self, question: Question, candidate: Candidate, trial: Trial
    ) -> dict[str, object]:
        """Costs of one token after `tokens` others, whose entries it leaves unchanged."""
        operations = trial.operations(candidate.encoding)
        work = candidate.encoding.work(self._shape, question.tokens + 1, self.block_size)
        return {
            "capability": operations.capability(Op.APPEND).value,
            "reason": operations.why_not(Op.APPEND),
            "written_entries": trial.kv.entries_per_token,
            "written_bytes": trial.kv.bytes_per_token,
            "work": asdict(work),
        }

    def _operation(self, question: Question) -> Operation:
        first, count = question.first // self.block_size, question.count // self.block_size
        match question.op:
            case Op.FORK:
                return Fork(SEQUENCE, "child", question.count)
            case Op.TRUNCATE:
                return Truncate(SEQUENCE, question.count)
            case Op.MOVE_SPAN:
                return Move(SEQUENCE, first, count, OTHER)
        return Evict(SEQUENCE, first, count, renumber=question.op is Op.EVICT_RENUMBER)

    def _recompute(self, question: Question) -> dict[str, object]:
        """What would be written to reach the same result without the operation."""
        later = question.tokens - question.first - question.count
        tokens = question.count if question.op is Op.MOVE_SPAN else later
        return {
            "tokens": tokens,
            "bytes": tokens * self.bytes_per_token,
            "estimated_seconds": self._speed.compute * tokens / self.block_size,
        }

    def _seconds(self, report: OpReport, trial: Trial) -> float:
        entries = trial.kv.entries_per_token * self.block_size
        # Only keys are rotated, and half of a block's entries are keys.
        turned, copied = 2 * report.rewritten / entries, report.copied / entries
        return turned * self._speed.turn + copied * self._speed.copy

    def _trial(self, lengths: Mapping[str, int]) -> Trial:
        return Trial(
            self._shape,
            lengths,
            block_size=self.block_size,
            dtype=self._dtype,
            gates=self._gates,
        )

    def _check_context(self, question: Question) -> None:
        appends = question.op is Op.APPEND
        if question.tokens + appends > self._max_context:
            raise InvalidField(
                f"tokens is {question.tokens}{' and one comes after them' if appends else ''}, but "
                f"the served context holds {self._max_context} tokens; send fewer",
                "tokens",
            )
        moves = question.op is Op.MOVE_SPAN
        if moves and question.offset + question.count > self._max_context:
            raise InvalidField(
                f"a span of {question.count} tokens at offset {question.offset} ends past the "
                f"served context of {self._max_context} tokens; send a lower offset",
                "offset",
            )

    def _check_span(self, question: Question) -> None:
        for name in FIELDS[question.op]:
            value = getattr(question, name)
            if value % self.block_size:
                raise InvalidField(
                    f"{name} is {value}, but operations work on whole blocks of {self.block_size} "
                    f"tokens; send a multiple of {self.block_size}",
                    name,
                )
        full = question.tokens // self.block_size * self.block_size
        if question.first + question.count > full:
            raise InvalidField(
                f"the span ends at token {question.first + question.count}, but the full blocks of "
                f"{question.tokens} tokens end at {full}; send a shorter span",
                "count",
            )


def _others(shape: ModelConfig) -> Iterator[Candidate]:
    """Every encoding of this project that such a model could have, with each key storage."""
    for name in names():
        try:
            encodings = in_each_storage(find(name), shape)
        except EncodingError:
            continue  # impossible with this number of heads or this width
        for encoding in encodings:
            yield Candidate(name, encoding, own=False)


def _lengths(question: Question) -> dict[str, int]:
    """Tokens of each sequence that the operation involves."""
    lengths = {SEQUENCE: question.tokens}
    return {**lengths, OTHER: question.offset} if question.op is Op.MOVE_SPAN else lengths
