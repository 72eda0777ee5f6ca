"""Builds models, caches, engines, the application and the server from a configuration."""

import asyncio
import gc
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Literal

import torch

from ropewalk.cache.keeper import Place as SecondPlace
from ropewalk.cache.kv import GATE, KVCache, bytes_per_token
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Audit
from ropewalk.model.attention.base import NoBackend
from ropewalk.model.catalogue import Place
from ropewalk.model.config import EncoderDecoderConfig
from ropewalk.model.decoder import Decoder, Forward
from ropewalk.model.encodings.base import EncodingError, create
from ropewalk.model.encodings.rope import RoPE
from ropewalk.model.kernels.backends import all_backends, sampler_of
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.loading.checkpoints import CheckpointError, InUse, files_of
from ropewalk.model.memory import is_out_of_memory
from ropewalk.model.weights.checksums import Seals
from ropewalk.server import hardware, listen
from ropewalk.server.app.app import Application, create_app
from ropewalk.server.app.cache import CachePlanner
from ropewalk.server.app.operations import Loader
from ropewalk.server.config import EventOptions, ModelOptions, ModelSource, ServerConfig
from ropewalk.server.engine.assemble import ledger_of, sums_by, wired
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.engine.engine import Engine
from ropewalk.server.engine.openmp import end_idle_threads, use_all_threads
from ropewalk.server.engine.statistics import Cost, PositionMeter, TimedDecoder, no_cost
from ropewalk.server.engine.warm_up import warm_up
from ropewalk.server.errors import CommandError
from ropewalk.server.http.middleware import Traces
from ropewalk.server.http.protocol import Server, uvicorn_config
from ropewalk.server.launch.banner import ModelFacts, banner
from ropewalk.server.launch.load_model import Prepared, find_kernels, open_source, prepare, require
from ropewalk.server.launch.self_check import check_parity
from ropewalk.server.metrics.exporter import ALIASES, Metrics
from ropewalk.server.openai.served_models import EncoderDecoderTokens, Models, Served
from ropewalk.server.scheduling.request import Limits, Outlook
from ropewalk.server.structured.compiler import Grammars
from ropewalk.server.terminal import discard_output
from ropewalk.server.tools.conventions import NO_TEMPLATE, conventions_of
from ropewalk.server.versions import installed

if TYPE_CHECKING:
    from ropewalk.server.events.publisher import Publisher

log = getLogger(__name__)

ENGINE_FAILED = 70  # exit status, at which a supervisor should start a fresh process
# Between two looks at memory while nobody asks: at all weights within 1,024 of these, in 9 minutes.
IDLE_S = 0.5
LONE_FACTOR = 2  # 4 made a prompt of 2,000 tokens no faster on a CPU


@dataclass(frozen=True, slots=True)
class Loaded:
    """One model ready to serve."""

    served: Served
    engine: Engine
    facts: ModelFacts
    place: Place
    planner: CachePlanner
    defect: str | None  # why it should not answer although it computes
    publisher: "Publisher | None" = None  # of what its cache holds

    def close(self) -> None:
        """The engine has stopped, so nothing more is to be told of its cache."""
        if self.publisher is not None:
            self.publisher.close()


@dataclass(frozen=True, slots=True)
class Built:
    """All that serves but the socket. The application's lifespan starts and stops the engine."""

    app: Application
    engine: AsyncEngine
    facts: Sequence[ModelFacts]
    close: Sequence[Callable[[], None]]  # to be called once the engine has stopped


def run(
    config: ServerConfig,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    traces: Traces | None = None,
) -> int:
    """Load every model and serve until stopped; returns the exit status. Raises CommandError.

    listener: a bound socket. tls: None for plain HTTP. traces: where requests are told of.
    """
    threads = hardware.pick_threads(config.loading.threads)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    metrics = Metrics(ALIASES[config.metrics_compat])
    server: Server | None = None

    def stop() -> None:
        if server is not None:
            server.should_exit = True

    built = application(config, metrics, stop, traces)
    app, engine = built.app, built.engine
    port = config.port if config.uds else listener.getsockname()[1]
    listening = uvicorn_config(
        app,
        host=config.host,
        port=port,
        tls=tls,
        log_level=config.log_level,
        access_log=False,
        log_config=None,
    )
    server = Server(listening, app.state.drain, config.drain_timeout_s)
    url = listen.local_url(config.host, port, tls=tls is not None)
    announce = partial(_announce, config, built.facts, url)
    gc.freeze()  # later collections need not look at what was loaded either
    gc.enable()
    asyncio.run(_serve(server, listener, announce))
    for close in built.close:
        close()
    return ENGINE_FAILED if engine.failure else 0


def application(
    config: ServerConfig,
    metrics: Metrics,
    on_failure: Callable[[], None],
    traces: Traces | None = None,
) -> Built:
    """Over the models that are loaded at the start. Raises CommandError, with one sentence.

    on_failure: called, on any thread, when the engine fails. traces: where requests are told of.
    """
    for source in config.others:  # whoever starts the server is told of a wrong path
        require(source)
    loaded = load_models(config, metrics)
    engine = engine_of(config, loaded, metrics, on_failure)
    planners = {model.served.name: model.planner for model in loaded}
    place = loaded[0].place if loaded else _any_place(config.loading)
    models, loader = _models(config, loaded, engine, metrics, planners)
    app = create_app(models, engine, metrics, config.http, place, planners, traces, loader)
    # No model is held here, since it may be unloaded.
    close = [model.publisher.close for model in loaded if model.publisher is not None]
    return Built(app, engine, [model.facts for model in loaded], close)


def _models(
    config: ServerConfig,
    loaded: Sequence[Loaded],
    engine: AsyncEngine,
    metrics: Metrics,
    planners: dict[str, CachePlanner],
) -> tuple[Models, Loader | None]:
    """The models to serve, and who loads and unloads them if that is wanted."""
    if not config.come_and_go:
        return Models(model.served for model in loaded), None
    # Late: few servers need it.
    from ropewalk.server.launch.registry import Registry

    registry = Registry(
        config,
        loaded,
        engine,
        metrics,
        planners,
        load=partial(_load_one, config, metrics),
        look=partial(_look, config.loading),
    )
    return registry, registry


def engine_of(
    config: ServerConfig, loaded: Sequence[Loaded], metrics: Metrics, on_failure: Callable[[], None]
) -> AsyncEngine:
    """One engine for all models; unsound from the start when one of them has a defect."""
    return AsyncEngine(
        {model.served.name: model.engine for model in loaded},
        metrics.observe_step,
        on_failure=on_failure,
        max_mutated_blocks=config.cache.max_mutated_blocks,
        idle_s=None if config.cache.audit == "off" else IDLE_S,
        defects={model.served.name: model.defect for model in loaded if model.defect is not None},
        others=Outlook(
            seats=config.limits.max_seqs,
            idle=True,
            places=config.limits.max_queue,
            most_s=config.limits.max_queue_time,
        ),
    )


def _load_one(
    config: ServerConfig,
    metrics: Metrics,
    source: ModelSource,
    others: int,
    check: Callable[[], None],
) -> Loaded:
    """A model for a server that has loaded `others` already. Raises CommandError."""
    use_all_threads()
    (loaded,) = load_models(replace(config, models=(source,)), metrics, others, check)
    if loaded.defect is not None:
        raise CommandError(loaded.defect)
    return loaded


def _look(loading: ModelOptions, source: ModelSource) -> None:
    """Reads what a model's files say of themselves. Raises CommandError where they are no good."""
    try:
        open_source(loading, source)
    except (CheckpointError, EncodingError) as error:
        raise CommandError(str(error)) from error


def load_models(
    config: ServerConfig,
    metrics: Metrics,
    others: int = 0,
    check: Callable[[], None] = lambda: None,
) -> list[Loaded]:
    """Every model that is loaded at the start, and warmed up. Raises CommandError.

    others: models that are in memory already. check: see `prepare`.
    """
    device = hardware.pick_device(config.loading.device)
    kernels = find_kernels(device)
    with ExitStack() as on_failure:
        publisher = None  # opened first, as its addresses may be taken
        if config.events is not None:
            publisher = _publisher(config.events, config.cache.block_size)
            on_failure.callback(publisher.close)
        prepared = [
            _prepared(config.loading, source, device, kernels, check) for source in config.models
        ]
        hardware.return_freed_memory()
        # Only now is it known how much memory the weights of all models leave.
        free = hardware.free_memory(device) // (config.max_models - others)
        alone = others == 0
        complete = partial(_complete, config, device, free, alone, metrics, kernels, publisher)
        loaded = [complete(model) for model in prepared]
        on_failure.pop_all()
    end_idle_threads()  # from here on only the engine's thread computes
    hardware.return_freed_memory()  # what was needed to load and to check
    return loaded


def _publisher(options: EventOptions, block_size: int) -> "Publisher":
    try:
        from ropewalk.server.events.publisher import Publisher
    except ImportError:
        raise CommandError(
            "--kv-events needs packages that are not installed; install them with: "
            'pip install "ropewalk[events]", or -e ".[events]" in a clone'
        ) from None
    return Publisher(options.endpoint, block_size, replay=options.replay, topic=options.topic)


def _any_place(loading: ModelOptions) -> Place:
    """Where models would be computed."""
    device = hardware.pick_device(loading.device)
    backends = all_backends(find_kernels(device))
    return Place(backends, hardware.pick_dtype(loading.dtype, device), device)


def _prepared(
    loading: ModelOptions,
    source: ModelSource,
    device: torch.device,
    kernels: Kernels | str,
    check: Callable[[], None],
) -> Prepared:
    try:
        return prepare(loading, source, device, kernels, check)
    except (CheckpointError, EncodingError, NoBackend) as error:
        raise CommandError(str(error)) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CommandError(
            f"the {device.type} does not have enough memory for the weights of {source.name}; free "
            "some, or serve it with --dtype bfloat16 or a smaller model"
        ) from error


def _complete(
    config: ServerConfig,
    device: torch.device,
    free_memory: int,
    alone: bool,
    metrics: Metrics,
    kernels: Kernels | str,
    publisher: "Publisher | None",
    model: Prepared,
) -> Loaded:
    """Give the model its share of the memory and an engine."""
    shape, name, block_size = model.checkpoint.config, model.name, config.cache.block_size
    audit = Audit(config.cache.audit)
    # Before anything is computed with them.
    weights = Seals({} if audit is Audit.OFF else model.decoder.fixed_tensors(), sums_by(kernels))
    budget, sharers = config.cache.kv_memory, config.max_models
    # An encoder-decoder keeps prompt and answer apart, each in blocks of its own.
    sides = 2 if isinstance(shape, EncoderDecoderConfig) else 1
    kv_dtype = torch.int8 if config.cache.kv_dtype == "int8" else model.dtype
    blocks = hardware.num_blocks(
        bytes_per_token(shape, kv_dtype, model.decoder.gates),
        budget=None if budget is None else budget // sharers,
        free_memory=free_memory,
        block_size=block_size,
        max_seqs=config.limits.max_seqs * sides,
        context=model.context,
    )
    kv = _allocate(model.decoder, kv_dtype, device, blocks, block_size)
    # A decoder's K and V depend on its own encoder's output, so equal prefixes differ in them.
    sharing = config.cache.prefix_sharing and sides == 1
    ledger = ledger_of(kv, kernels, audit)
    slots = hardware.num_slots(config.cache.kv_spill, kv, sharers)
    place = _place(kv, slots, ledger) if slots else None
    observer = None if publisher is None else publisher.changes
    manager = CacheManager(
        blocks, block_size, prefix_sharing=sharing, place=place, observer=observer
    )
    context = _fitting(model.context, _longest(manager, sides, name), name)
    if context < model.context:
        _require_same_frequencies(model, context, device)
    sampler = sampler_of(model.decoder, kernels)
    speed = warm_up(model.decoder, sampler, kv, shape, context, name)
    parity = check_parity(model.decoder, shape, kv, context)
    limits = Limits(
        max_seqs=config.limits.max_seqs,
        max_step_tokens=hardware.num_step_tokens(
            config.limits.max_step_tokens, config.limits.max_seqs, model.decoder
        ),
        max_context=context,
        max_queue=config.limits.max_queue,
        # Larger steps are faster, and a lone request delays no other; but several models take
        # turns step by step, and a GPU's steps are large.
        lone_factor=LONE_FACTOR if config.max_models == 1 and device.type == "cpu" else 1,
        max_queue_s=config.limits.max_queue_time,
        several_clients=len(config.http.api_keys) > 1,
        draft_tokens=hardware.num_draft_tokens(
            config.limits.draft_tokens, model.decoder, model.backend.name
        ),
    )
    rules = [model.decoder.encoding.for_layer(layer) for layer in range(shape.num_layers)]
    decoder = TimedDecoder(model.decoder)
    made = wired(
        name,
        _choose_forward(model, kv, limits, decoder, alone),
        kv,
        manager,
        rules,
        limits,
        _meter(model, block_size),
        kernels,
        sampler=sampler,
        ledger=ledger,
        weights=weights,
        drain_times=decoder.drain,
        ahead=device.type == "cuda" and not limits.draft_tokens,
    )
    rotation = model.decoder.encoding.rotation()
    facts = ModelFacts(
        name=name,
        architecture=model.checkpoint.architecture,
        encoding=shape.encoding.name,
        trained_context=shape.trained_context,
        max_context=context,
        device=hardware.device_name(device),
        dtype=hardware.dtype_name(model.dtype),
        attention=model.backend.name,
        kv_dtype=hardware.dtype_name(kv_dtype),
        kv_bytes_per_token=kv.bytes_per_token,
        blocks=blocks - 1,
        block_size=block_size,
        chat=model.checkpoint.chat_template is not None,
        key_storage=None if rotation is None else rotation.storage,
        sides=sides,
        quantize=model.quantize,
        max_step_tokens=limits.max_step_tokens,
    )
    _register(metrics, facts, model.decoder)
    metrics.compared(name, parity.error, parity.tolerance)
    defect = parity.defect(name)
    if defect is not None:
        log.error("%s", defect)
    planner = CachePlanner(
        shape,
        model.decoder.encoding,
        dtype=kv_dtype,
        block_size=block_size,
        max_context=context,
        speed=speed,
    )
    bits: Literal[8, 4] | None = None
    if model.quantize is not None:
        bits = 8 if model.quantize == "int8" else 4
    in_use = InUse(
        model.checkpoint,
        model.context,
        model.dtype,
        kv_dtype,
        bits,
        block_size,
        files_of(model.checkpoint.path),
    )
    served = _served(model.aliases, in_use, facts, limits)
    return Loaded(served, made.engine, facts, model.place, planner, defect, publisher)


def _choose_forward(
    model: Prepared, kv: KVCache, limits: Limits, plain: Forward, alone: bool
) -> Forward:
    """The decoder's passes, of which CUDA graphs replay those that they can."""
    if not model.decoder.executor.recordable:
        return plain
    from ropewalk.server.launch.graphs import record_graphs

    return record_graphs(model.decoder, kv, limits, model.name, otherwise=plain, alone=alone)


def _meter(model: Prepared, block_size: int) -> PositionMeter:
    """The meter of the work that the model's positions cost."""
    decoder, shape = model.decoder, model.checkpoint.config
    cost = partial(decoder.encoding.work, shape, block_size=block_size)
    source_cost: Cost = no_cost
    if isinstance(shape, EncoderDecoderConfig):
        encoding = decoder.encoder_encoding
        assert encoding is not None, "an encoder-decoder has an encoding on each side"
        source_cost = partial(encoding.work, shape.encoder, block_size=block_size)
    return PositionMeter(cost, source_cost, shape.trained_context)


def _allocate(
    decoder: Decoder, dtype: torch.dtype, device: torch.device, blocks: int, block_size: int
) -> KVCache:
    shape, gates = decoder.config, decoder.gates
    try:
        return KVCache(
            shape, blocks=blocks, block_size=block_size, dtype=dtype, device=device, gates=gates
        )
    except (OSError, RuntimeError) as error:  # out of memory: torch's error, on every device
        size = blocks * block_size * bytes_per_token(shape, dtype, gates)
        raise CommandError(
            f"the {device.type} does not have enough memory for a cache of {size:,} bytes; lower "
            "--kv-memory"
        ) from error


def _place(kv: KVCache, slots: int, ledger: Ledger) -> SecondPlace:
    from ropewalk.cache.spill import HostMemory

    try:
        return HostMemory(kv, slots, ledger)
    except RuntimeError as error:  # as above
        size = slots * kv.block_size * kv.bytes_per_token
        raise CommandError(
            f"there is not enough host memory for {size:,} bytes of blocks that make room in the "
            "cache; lower --kv-spill, or use --kv-spill 0"
        ) from error


def _register(metrics: Metrics, facts: ModelFacts, decoder: Decoder) -> None:
    shape = decoder.config
    metrics.add_model(
        facts.name,
        facts.encoding,
        {
            "kv_dtype": facts.kv_dtype,
            "num_layers": str(shape.num_layers),
            "num_kv_heads": str(shape.num_kv_heads),
            "head_dim": str(shape.head_dim),
            "trained_context": str(shape.trained_context),
        },
        bytes_per_token=facts.kv_bytes_per_token,
        gate_bytes=shape.num_layers * decoder.gates * GATE.itemsize,
        blocks=facts.blocks,
        block_size=facts.block_size,
        position_apart=decoder.position_apart,
    )


def _longest(manager: CacheManager, sides: int, name: str) -> int:
    """The longest context that the cache holds; with two sides, for each of prompt and answer.

    The last token of an answer is never stored, hence one more than the cache has room for.
    """
    if sides == 1:
        return manager.capacity + 1
    pairs, odd = divmod(manager.capacity // manager.block_size, 2)
    if pairs == 0:
        raise CommandError(
            f"the cache of {name} has only one block, but prompt and answer need one each; raise "
            "--kv-memory"
        )
    return pairs * manager.block_size + odd


def _fitting(context: int, cacheable: int, name: str) -> int:
    if context > cacheable:
        log.warning(
            "%s is served with a context of %d tokens instead of %d, because its cache does not "
            "hold more; raise --kv-memory",
            name,
            cacheable,
            context,
        )
    return min(context, cacheable)


def _require_same_frequencies(model: Prepared, context: int, device: torch.device) -> None:
    """Some models' RoPE frequencies depend on the served length, which was taken to be longer."""
    shape = model.checkpoint.config
    encoding = create(shape.encoding, shape, context, device)
    rules = {encoding.for_layer(layer) for layer in range(shape.num_layers)}
    if any(
        isinstance(rule, RoPE)
        and not torch.equal(rule.frequencies, rule.frequencies_at(model.context))
        for rule in rules
    ):
        raise CommandError(
            f"the cache of {model.name} holds only {context} tokens, for which RoPE's frequencies "
            f"differ from those for {model.context}; use --max-model-len {context} or raise "
            "--kv-memory"
        )


def _served(aliases: tuple[str, ...], in_use: InUse, facts: ModelFacts, limits: Limits) -> Served:
    checkpoint = in_use.checkpoint
    shape, template = checkpoint.config, checkpoint.chat_template
    vocab_size = min(checkpoint.tokenizer.vocab_size, shape.vocab_size)
    return Served(
        name=facts.name,
        encoding=facts.encoding,
        tokenizer=checkpoint.tokenizer,
        chat_template=template,
        conventions=NO_TEMPLATE if template is None else conventions_of(template),
        stop_ids=checkpoint.stop_ids,
        vocab_size=vocab_size,
        max_context=facts.max_context,
        created=int(time.time()),
        aliases=aliases,
        embedding=checkpoint.embedding,
        hidden_size=shape.embed_width or shape.hidden_size,
        encoder_decoder=(
            EncoderDecoderTokens(shape.start_token, shape.end_token)
            if isinstance(shape, EncoderDecoderConfig)
            else None
        ),
        max_at_once=limits.max_seqs + limits.most_queue,
        grammars=(
            None
            if isinstance(shape, EncoderDecoderConfig)
            else Grammars(checkpoint.tokenizer, vocab_size, checkpoint.stop_ids)
        ),
        in_use=in_use,
        details={
            "architecture": facts.architecture,
            "vocab_size": vocab_size,
            "trained_context": facts.trained_context,
            "dtype": facts.dtype,
            "quantize": facts.quantize,
        },
    )


def _announce(config: ServerConfig, models: Sequence[ModelFacts], url: str) -> None:
    if config.log_format == "json":  # whoever reads that reads no boxes
        log.info("serving %s at %s", ", ".join(model.name for model in models), config.uds or url)
        return
    text = banner(
        models,
        url=url,
        open_to_all=not config.http.api_keys,
        version=installed("ropewalk"),
        uds=config.uds,
        certificate=config.ssl_certfile,
        others=[source.name for source in config.others],
        explorer=config.http.explorer,
    )
    try:
        print(text, flush=True)
    except OSError as error:  # the disk is full, or whoever read it has left
        log.warning("standard output cannot be written: %s", error.strerror)
        discard_output()


async def _serve(server: Server, listener: socket.socket, announce: Callable[[], None]) -> None:
    announcement = asyncio.create_task(_once_started(server, announce))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcement.cancel()


async def _once_started(server: Server, announce: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    announce()
