"""The only wiring: from a configuration to models, caches, engines, the application, a server."""

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from logging import getLogger

import torch
from tqdm import tqdm

from cache.kv import KVCache
from cache.manager import CacheManager
from model.attention.base import AttentionBackend, AttentionSpec, NoBackend, choose
from model.attention.cpu import CpuBackend
from model.attention.reference import ReferenceAttention
from model.attention.sdpa import SdpaAttention
from model.batch import ForwardBatch
from model.config import EncodingSpec
from model.encodings.base import EncodingError, PositionalEncoding, create
from model.kernels.build import Kernels, NoKernels
from model.kernels.build import load as load_kernels
from model.kernels.substitutes import substitute
from model.loading import Checkpoint, CheckpointError, load_decoder, open_checkpoint
from model.transformer import Decoder
from server import listen, placement, pull
from server.app import HttpOptions, create_app, own_version
from server.async_engine import AsyncEngine
from server.banner import ModelFacts, banner
from server.config import ModelOptions, ModelSource, ServerConfig
from server.engine import Engine
from server.errors import CommandError
from server.metrics import Metrics
from server.models import Models, Served
from server.protocol import Server, server_config
from server.scheduler import Limits, Scheduler

log = getLogger(__name__)

ENGINE_FAILED = 70  # exit status: a supervisor should start a fresh process


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model ready to serve."""

    served: Served
    engine: Engine
    facts: ModelFacts


def run(config: ServerConfig) -> int:
    """Load every model, serve until told to stop; the exit status. CommandError when it cannot."""
    http = config.http
    listener = listen.bind(http.host, http.port)
    if config.loading.threads is not None:
        torch.set_num_threads(config.loading.threads)
    metrics = Metrics()
    loaded = load_models(config, metrics)
    served = Models(model.served for model in loaded)
    server: Server | None = None

    def stop() -> None:
        if server is not None:
            server.should_exit = True

    engines = {model.served.name: model.engine for model in loaded}
    engine = AsyncEngine(engines, metrics.observe_step, on_failure=stop)
    options = HttpOptions(
        api_keys=http.api_keys,
        request_timeout_s=http.request_timeout_s,
        allowed_hosts=http.allowed_hosts,
        share_prefixes=http.share_prefixes,
    )
    app = create_app(served, engine, metrics, options)
    port = listener.getsockname()[1]
    uvicorn_config = server_config(
        app,
        host=http.host,
        port=port,
        log_level=config.log_level,
        access_log=False,
        log_config=None,
    )
    server = Server(uvicorn_config, app.state.drain, http.drain_timeout_s)
    text = banner(
        [model.facts for model in loaded],
        url=listen.local_url(http.host, port),
        open_to_all=not http.api_keys,
        version=own_version(),
    )
    asyncio.run(_serve(server, listener, text))
    return ENGINE_FAILED if engine.failure else 0


def load_models(config: ServerConfig, metrics: Metrics) -> list[Loaded]:
    """Every configured model, loaded and warmed up. CommandError, one sentence, otherwise."""
    device = placement.pick_device(config.loading.device)
    kernels = _kernels(device)
    free = placement.free_memory(device)
    budget = config.cache.kv_memory
    share = (free if budget is None else budget) // len(config.models)
    loaded = []
    for source in config.models:
        try:
            loaded.append(_load_model(config, source, device, kernels, share, metrics))
        except (CheckpointError, EncodingError, NoBackend) as error:
            raise CommandError(str(error)) from error
    return loaded


def _load_model(
    config: ServerConfig,
    source: ModelSource,
    device: torch.device,
    kernels: Kernels | str,
    cache_bytes: int,
    metrics: Metrics,
) -> Loaded:
    checkpoint = open_checkpoint(pull.locate(source.source))
    loading = config.loading
    if loading.encoding is not None and loading.encoding != checkpoint.config.encoding.name:
        # Another encoding than the weights were trained with: an experiment, asked for by name.
        changed = replace(checkpoint.config, encoding=EncodingSpec(loading.encoding, {}))
        checkpoint = replace(checkpoint, config=changed)
    shape = checkpoint.config
    dtype = placement.pick_dtype(loading.dtype, device)
    context = loading.max_model_len or shape.trained_context
    encoding = create(shape.encoding, shape, context, device)
    if encoding.max_positions is not None:
        context = min(context, encoding.max_positions)
    backend = _backend(checkpoint, loading, dtype, device, kernels)
    decoder = _load_decoder(checkpoint, source.name, encoding, backend, dtype, device)
    if isinstance(kernels, Kernels):
        substitute(decoder, kernels, dtype)
    blocks = placement.num_blocks(
        shape,
        dtype,
        budget=None if config.cache.kv_memory is None else cache_bytes,
        free_memory=cache_bytes,
        block_size=config.cache.block_size,
        max_seqs=config.limits.max_seqs,
        context=context,
    )
    context = _fitting(context, (blocks - 1) * config.cache.block_size + 1, source.name)
    kv = KVCache(
        layers=shape.layers,
        blocks=blocks,
        block_size=config.cache.block_size,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )
    _warm_up(decoder, kv, device, source.name)
    manager = CacheManager(
        blocks, config.cache.block_size, prefix_sharing=config.cache.prefix_sharing
    )
    limits = Limits(
        max_seqs=config.limits.max_seqs,
        max_step_tokens=config.limits.max_step_tokens,
        max_context=context,
        max_waiting=config.limits.max_queue,
    )
    engine = Engine(decoder, kv, manager, Scheduler(manager, limits), device=device)
    encoding_name = shape.encoding.name
    metrics.add_model(
        source.name,
        encoding_name,
        {
            "kv_dtype": _dtype_name(dtype),
            "layers": str(shape.layers),
            "kv_heads": str(shape.kv_heads),
            "head_dim": str(shape.head_dim),
            "trained_context": str(shape.trained_context),
        },
        bytes_per_token=kv.bytes_per_token,
        blocks=blocks - 1,
        block_size=config.cache.block_size,
        max_context=context,
    )
    facts = ModelFacts(
        name=source.name,
        architecture=checkpoint.architecture,
        encoding=encoding_name,
        trained_context=shape.trained_context,
        max_context=context,
        device=placement.device_name(device),
        dtype=_dtype_name(dtype),
        attention=backend.name,
        kv_bytes_per_token=kv.bytes_per_token,
        blocks=blocks - 1,
        block_size=config.cache.block_size,
        chat=checkpoint.chat_template is not None,
    )
    return Loaded(_served(source.name, checkpoint, facts), engine, facts)


def _fitting(context: int, cacheable: int, name: str) -> int:
    """The last token of a sequence is never stored, hence one more than the cache holds."""
    if context > cacheable:
        log.warning(
            "%s is served with a context of %d tokens instead of %d, because its cache holds no "
            "more; raise --kv-memory",
            name,
            cacheable,
            context,
        )
    return min(context, cacheable)


def _served(name: str, checkpoint: Checkpoint, facts: ModelFacts) -> Served:
    return Served(
        name=name,
        encoding=facts.encoding,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        stop_ids=checkpoint.stop_ids,
        vocab_size=min(checkpoint.tokenizer.vocab_size, checkpoint.config.vocab_size),
        max_context=facts.max_context,
        created=int(time.time()),
        details={
            "architecture": facts.architecture,
            "encoding": facts.encoding,
            "trained_context": facts.trained_context,
            "dtype": facts.dtype,
        },
    )


def _kernels(device: torch.device) -> Kernels | str:
    """The compiled CPU kernels, or why there are none."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    try:
        return load_kernels(pull.home() / "kernels")
    except NoKernels as error:
        log.warning("serving without the CPU kernels, several times slower: %s", error)
        return str(error)


def _backend(
    checkpoint: Checkpoint,
    loading: ModelOptions,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | str,
) -> AttentionBackend:
    """The first backend that can, or the one asked for if it can. Raises NoBackend."""
    backends: list[AttentionBackend] = [CpuBackend(kernels), SdpaAttention, ReferenceAttention]
    if loading.attention is not None:
        backends = [backend for backend in backends if backend.name == loading.attention]
    shape = checkpoint.config
    spec = AttentionSpec(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=1.0,
        dtype=dtype,
        device=device,
    )
    return choose(backends, spec)


def _load_decoder(
    checkpoint: Checkpoint,
    name: str,
    encoding: PositionalEncoding,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    decoder = Decoder(checkpoint.config, encoding, backend, dtype=dtype, device=device)
    with tqdm(desc=f"loading {name}", unit="tensor", leave=False, file=sys.stderr) as bar:
        load_decoder(checkpoint, decoder, _progress(bar))
    return decoder


def _progress(bar: "tqdm[None]") -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return report


def _warm_up(decoder: Decoder, kv: KVCache, device: torch.device, name: str) -> None:
    """One token through the reserved block 0: what is broken shows before a client does."""
    zero, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64)
    logits = decoder(
        ForwardBatch(
            tokens=zero,
            positions=zero,
            offsets=zero,
            slots=zero,
            query_starts=torch.arange(2, device=device),
            context_lens=one.to(device),
            block_tables=zero[None],
            block_bases=zero[None],
            output_rows=zero,
            max_query=1,
            max_context=1,
        ),
        kv,
    )
    if not bool(logits.isfinite().all()):
        raise CommandError(f"{name} computes numbers that are not finite; try --dtype float32")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


async def _serve(server: Server, listener: socket.socket, text: str) -> None:
    announcement = asyncio.create_task(_announce(server, text))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcement.cancel()


async def _announce(server: Server, text: str) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    print(text, flush=True)
