"""An Engine over a fake model that counts: the next token is the last one plus one."""

import random
import time
from dataclasses import fields, replace

import torch

from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import Ledger
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.spill import HostMemory
from ropewalk.cache.types import Audit
from ropewalk.model.catalogue import in_each_storage
from ropewalk.model.config import EncodingSpec
from ropewalk.model.encodings.base import find
from ropewalk.model.sampler import Sampler
from ropewalk.model.sampling import SamplingParams
from ropewalk.model.weights.checksums import Seals
from ropewalk.server.app.app import create_app
from ropewalk.server.app.cache import CachePlanner
from ropewalk.server.config import HttpOptions
from ropewalk.server.engine.async_engine import AsyncEngine
from ropewalk.server.engine.engine import Engine, Runner
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.engine.warm_up import Speed
from ropewalk.server.launch.build import engine_of, load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.openai.served_models import Models
from ropewalk.server.scheduling.request import Limits, Request
from ropewalk.server.scheduling.scheduler import Scheduler
from tests.cache.bookkeeping import Bookkeeping
from tests.cache.shape import Shape
from tests.command_line import configured
from tests.model.tiny import CONFIG
from tests.server.toy import toy, toy_app

VOCAB = 50
BLOCK = 4
CPU = torch.device("cpu")
SHAPE = Shape(2, 3, 2)
PARAMS = {each.name for each in fields(SamplingParams)}
SPEED = Speed(turn=0.25, copy=0.5, compute=8.0)


def counting(batch, kv):
    """Logits [S, VOCAB] whose largest is the token after each wanted row's own."""
    batch = batch.to(CPU)
    following = (batch.tokens[batch.output_rows] + 1) % VOCAB
    return torch.nn.functional.one_hot(following, VOCAB).float()


def slowly(batch, kv):
    time.sleep(0.01)
    return counting(batch, kv)


def make_engine(
    forward=counting,
    *,
    shape=SHAPE,
    blocks=40,
    audit=Audit.FULL,
    sharing=True,
    spill=0,
    weights=None,
    clock=None,
    meter=None,
    ahead=False,
    drain_times=tuple,
    **limits,
):
    """An engine and its cache manager. What a fake model does not write must not change."""
    chosen = {"max_seqs": 16, "max_step_tokens": 64, "max_context": 100, "max_queue": 50}
    kv = KVCache(shape, blocks=blocks, block_size=BLOCK, dtype=torch.float32, device=CPU)
    ledger = Ledger(kv, audit)
    place = HostMemory(kv, spill, ledger) if spill else None
    manager = CacheManager(blocks, BLOCK, prefix_sharing=sharing, place=place)
    scheduler = Scheduler(manager, Limits(**chosen | limits), Bookkeeping(manager))
    more = {"drain_times": drain_times} | ({} if clock is None else {"clock": clock})
    seals = None if weights is None else Seals(weights)
    auditor = Auditor("fake", ledger, manager, scheduler, seals)
    meter = meter or PositionMeter()
    run = Runner(forward, kv, manager, Sampler())
    if ahead:
        more["launch"] = run.launch
    made = Engine(run, kv, manager, scheduler, auditor, meter, **more)
    return made, manager


def make_planner(encoding="rope", *, shape=CONFIG, max_context=100, speed=SPEED, **options):
    """A planner for a cache of `shape` in float32, with that encoding as the model's own."""
    (own, *_) = (
        each
        for each in in_each_storage(find(encoding), shape)
        if each.key_storage == options.get("storage", each.key_storage)
    )
    return CachePlanner(
        replace(shape, encoding=EncodingSpec(encoding, options)),
        own,
        dtype=torch.float32,
        block_size=BLOCK,
        max_context=max_context,
        speed=speed,
    )


def load_one(*flags):
    """The one model of a server with these flags."""
    (loaded,) = load_models(configured(*map(str, flags)), Metrics())
    return loaded


def loaded_app(*flags):
    """The application of a server with these flags; its metrics are in its state."""
    config, metrics = configured(*flags), Metrics()
    loaded = load_models(config, metrics)
    engine = engine_of(config, loaded, metrics, lambda: None)
    planners = {each.served.name: each.planner for each in loaded}
    models = Models(each.served for each in loaded)
    app = create_app(models, engine, metrics, HttpOptions(), None, planners)
    app.state.metrics = metrics
    return app


def engine_app(engine, served=None, *, options=None, **more):
    """The application of a toy over an engine that steps in its thread.

    options: of the asynchronous engine; more: of `toy_app`.
    """
    served, metrics = served or toy(vocab_size=VOCAB, max_context=100), Metrics()
    running = AsyncEngine({served.name: engine}, metrics.observe_step, **options or {})
    return toy_app(running, [served], metrics, **more)


def make_request(name, prompt, **chosen):
    """Greedy and of five tokens. `chosen`: fields of the request, or of its parameters."""
    chosen = {"arrival": 0.0, "rng": random.Random(0), "max_tokens": 5, "temperature": 0.0} | chosen
    own, params = {}, {}
    for key, value in chosen.items():
        (params if key in PARAMS else own)[key] = value
    return Request(name, list(prompt), len(prompt), SamplingParams(**params), **own)
