"""Ropewalk as a worker of NVIDIA Dynamo: token ids in, tokens out, and KV events for its router.

    python deploy/dynamo/worker.py smollm2 --tokenizer ./SmolLM2-135M-Instruct --kv-memory 1GiB

Takes the models and options of `ropewalk serve`, besides those below. Dynamo's frontend makes token
ids of texts, so it needs a folder with the model's tokenizer.json and config.json.
"""

import argparse
import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import torch
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from ropewalk.server import hardware
from ropewalk.server.cli.serve import as_told, is_flag, serve
from ropewalk.server.config import EventOptions, ServerConfig, server_config
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.errors import CommandError, NotReady, ServeError, UsageError, WeightsChanged
from ropewalk.server.launch.build import Loaded, engine_of, load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.body import read_body
from ropewalk.server.openai.requests import choices_for, completion_prompts
from ropewalk.server.openai.schemas import CompletionBody
from ropewalk.server.scheduling.request import FinishReason, Request

# What Dynamo calls as the HTTP API does.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
FINISHES = {FinishReason.STOP: "stop", FinishReason.ABORT: "cancelled"}  # others: length
# Of the HTTP side, which a worker does not have.
FOREIGN = (
    *("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "root_path", "api_key", "allowed_host"),
    *("drain_timeout", "request_timeout", "operator_routes", "otlp_endpoint", "metrics_compat"),
)
FAILED = 70  # the exit status of a server whose engine failed
LAST_WORDS_S = 1.0  # until a worker ends whose engine failed, for the errors of what runs
SALT = "dynamo-cache-salt:"  # by which Dynamo's router knows a salt among events' extra keys


class RopewalkEngine(LLMEngine):
    """One model of a configuration that publishes KV events. Made by `from_args`."""

    def __init__(self, config: ServerConfig, folder: str) -> None:
        self._config = config
        self._folder = folder
        self._metrics = Metrics()
        self._loaded: Loaded | None = None
        self._engine: AsyncEngine | None = None
        self._running: dict[str, Request] = {}  # by the context's id

    @classmethod
    async def from_args(
        cls, argv: list[str] | None = None
    ) -> tuple["RopewalkEngine", WorkerConfig]:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--tokenizer", metavar="FOLDER", help="default: the model")
        for name, default in {
            "namespace": "dynamo",
            "component": "ropewalk",
            "endpoint": "generate",
            "endpoint-types": "chat,completions",
            "discovery-backend": os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            "request-plane": os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            "event-plane": os.environ.get("DYN_EVENT_PLANE"),
        }.items():
            parser.add_argument(f"--{name}", default=default, help=f"default: {default}")
        own, words = parser.parse_known_args(argv)
        told = serve.make_context("worker.py", words)
        for name in FOREIGN:
            if is_flag(told, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is of the HTTP side, which a worker does not have")
        config = server_config(as_told(told))
        if len(config.models) != 1:
            raise UsageError("a worker has one model; start another worker for each of the others")
        if config.events is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            config = replace(config, events=EventOptions(endpoint, None, ""))
        fields = vars(own)
        folder = fields.pop("tokenizer") or config.models[0].source
        name = config.models[0].name
        worker = WorkerConfig(model_name=folder, served_model_name=name, **fields)
        return cls(config, folder), worker

    async def start(self, worker_id: int) -> EngineConfig:
        torch.set_num_threads(hardware.pick_threads(self._config.loading.threads))
        try:
            (self._loaded,) = await asyncio.to_thread(load_models, self._config, self._metrics)
        except CommandError as error:
            raise EngineShutdown(str(error)) from error
        if self._loaded.defect is not None:
            raise EngineShutdown(self._loaded.defect)
        self._engine = engine_of(self._config, [self._loaded], self._metrics, end_soon)
        self._engine.start()
        facts, limits = self._loaded.facts, self._config.limits
        return EngineConfig(
            model=self._folder,
            served_model_name=facts.name,
            llm=LlmRegistration(
                context_length=facts.max_context,
                kv_cache_block_size=facts.block_size,
                total_kv_blocks=facts.blocks,
                max_num_seqs=limits.max_seqs,
                max_num_batched_tokens=facts.max_step_tokens,
            ),
        )

    async def kv_event_sources(self) -> list[ZmqSource]:
        return [ZmqSource(self._config.events.endpoint, self._config.events.topic)]

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self._metrics.registry, prefix_filters=["ropewalk_"])

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(bos_token_id=1)

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        served, engine = self._loaded.served, self._engine
        used = {"prompt_tokens": len(request["token_ids"]), "completion_tokens": 0}
        try:
            body = read_body(CompletionBody, fields_of(request, served.max_context))
            prompts = await completion_prompts(body, served)
            if body.n not in (None, 1):
                raise InvalidArgument("n does not pass through Dynamo; ask for one answer each")
            (choice,) = choices_for(body, prompts, served, salt_of(request))
            self._running[context.id()] = choice.request
            async with aclosing(engine.generate(served.name, [choice.request])) as batches:
                async for batch in batches:
                    events = [event for _, some in batch for event in some]
                    last = events[-1]
                    if last.error is not None:
                        raise last.error
                    new = [event.token for event in events if event.token is not None]
                    used["completion_tokens"] += len(new)
                    chunk: dict[str, Any] = {"token_ids": new, "index": 0}
                    if last.finish is not None:
                        used["total_tokens"] = sum(used.values())
                        cached = {"cached_tokens": choice.request.cached}
                        chunk["finish_reason"] = FINISHES.get(last.finish, "length")
                        chunk["completion_usage"] = {**used, "prompt_tokens_details": cached}
                    yield chunk
        except ServeError as error:
            raise kind_of(error)(str(error)) from error
        finally:
            self._running.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        request = self._running.get(context.id())
        if request is not None:
            self._engine.abort(self._loaded.served.name, request)

    async def cleanup(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()
            self._loaded.close()


def end_soon() -> None:
    """End the process, as a server whose engine failed does: then Dynamo asks others."""
    timer = threading.Timer(LAST_WORDS_S, os._exit, (FAILED,))
    timer.daemon = True
    timer.start()


def kind_of(error: ServeError) -> type[Exception]:
    """Dynamo's name for it: after EngineShutdown it asks another worker."""
    if isinstance(error, NotReady | WeightsChanged):
        return EngineShutdown
    return InvalidArgument if error.status in range(400, 429) else Unknown


def fields_of(request: Mapping[str, Any], context: int) -> dict[str, Any]:
    """A request of Dynamo's as a body of /v1/completions. Raises InvalidArgument."""
    sampling: Mapping[str, Any] = request.get("sampling_options") or {}
    stopping: Mapping[str, Any] = request.get("stop_conditions") or {}
    output: Mapping[str, Any] = request.get("output_options") or {}
    for name, given in {**sampling, **output}.items():
        if given and name in ("guided_decoding", "logprobs", "prompt_logprobs"):
            raise InvalidArgument(
                f"{name} does not pass through Dynamo; ask a Ropewalk server directly"
            )
    fields: dict[str, Any] = {
        "prompt": request["token_ids"],
        "max_tokens": max(1, context - len(request["token_ids"])),
        "n": sampling.get("n"),
        # Those of the client; the model's own, which are hidden ones, this end knows.
        "stop_token_ids": stopping.get("stop_token_ids") or [],
    }
    given = {name: sampling.get(name) for name in SAMPLING}
    given |= {name: stopping.get(name) for name in STOPPING}
    return fields | {name: value for name, value in given.items() if value is not None}


def salt_of(request: Mapping[str, Any]) -> str:
    for source in (request, request.get("extra_args") or {}):
        salt = (source.get("nvext") or {}).get("cache_salt")
        if salt:
            return f"{SALT}{salt}"
    return ""


if __name__ == "__main__":
    run(RopewalkEngine)
