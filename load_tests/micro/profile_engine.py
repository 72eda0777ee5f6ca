"""Times the parts of an engine's step; what is left is a part, too."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor, nn

from ropewalk.cache.kv import KVCache
from ropewalk.load_tests.micro.engines import decoding
from ropewalk.load_tests.micro.stopwatch import Stopwatch
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.kernels.cpu.layers import KernelLayers, Part
from ropewalk.model.kernels.cpu.modules import GatedPanelLinear, KernelNorm, PanelLinear
from ropewalk.model.kernels.triton.layers import TritonLayers
from ropewalk.model.kernels.triton.modules import TritonGate, TritonLinear
from ropewalk.model.layers.decoder import Activate, Attention, Decoder, Gate, LayerNorm, RMSNorm
from ropewalk.model.layers.linear import Int8Linear, Linear
from ropewalk.server.engine.assemble import Wired
from ropewalk.server.engine.forward_timer import told_by, watched
from ropewalk.server.metrics.exporter import Metrics

T = TypeVar("T")

LINEAR, HEAD, ATTENTION, POSITION = "linear layers", "head", "attention", "position"
NORM, ACTIVATION, STORE, RESIDUAL = "norm", "activation", "keys and values stored", "residual"
CALLS, EMBEDDING, DECODER = "kernel call", "embedding", "rest of the decoder"
SAMPLING, SCHEDULER, BATCH = "sampling", "scheduler", "batch building"
AUDIT, METRICS, REST = "audit", "metrics", "rest"
PARTS = (
    *(LINEAR, HEAD, ATTENTION, POSITION, NORM, ACTIVATION, STORE, RESIDUAL, CALLS),
    *(EMBEDDING, DECODER, SAMPLING, SCHEDULER, BATCH, AUDIT, METRICS, REST),
)

_TOLD: Mapping[Part, str] = {
    Part.NORM: NORM,
    Part.LINEAR: LINEAR,
    Part.TURN: POSITION,
    Part.STORE: STORE,
    Part.ATTENTION: ATTENTION,
    Part.RESIDUAL: RESIDUAL,
    Part.EMBEDDING: EMBEDDING,
    Part.HEAD: HEAD,
}
_MODULES: Mapping[type[nn.Module], str] = {
    **dict.fromkeys((Linear, Int8Linear, PanelLinear, GatedPanelLinear), LINEAR),
    **dict.fromkeys((RMSNorm, LayerNorm, KernelNorm), NORM),
    **dict.fromkeys((Gate, TritonGate, Activate), ACTIVATION),
    nn.Embedding: EMBEDDING,
}
_NAME = "profiled"
_WARM = 4  # steps before any is timed


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step by those of PARTS that it has; and of a step that is not watched."""

    parts: Mapping[str, float]
    unwatched: float

    @property
    def step(self) -> float:
        return sum(self.parts.values())


def metrics_for(name: str, kv: KVCache) -> Metrics:
    """The server's metrics, with one model."""
    metrics = Metrics()
    per_token = kv.bytes_per_token
    metrics.add_model(
        name, "", {}, bytes_per_token=per_token, blocks=kv.blocks, block_size=kv.block_size
    )
    return metrics


def told_by_kernels(decoder: Decoder) -> bool:
    """Whether all layers are one call, which measures its parts; else modules are watched."""
    return isinstance(decoder.layers, KernelLayers)


def step_times(
    decoder: Decoder,
    requests: int,
    context: int,
    steps: int,
    *,
    kernels: Kernels | str,
    clock: Callable[[], float] | None = None,
) -> StepTimes:
    """Means over the faster half of `steps` watched steps, and of as many unwatched ones.

    Watched and unwatched steps are mixed at random. Every step gives each of `requests` its next
    token, set up as by `decoding`. `kernels` are the CPU's, for what is outside the decoder, or why
    there are none.
    """
    clock = clock or partial(_clock, decoder.embed.weight.device)
    watch = Stopwatch(clock)

    def forward(batch: ForwardBatch, kv: KVCache) -> Tensor:
        with watch.during(DECODER):
            logits: Tensor = decoder(batch, kv)
        return logits

    made = decoding(
        decoder,
        requests,
        context,
        _WARM + 2 * steps,
        kernels=kernels,
        forward=forward,
    )
    observe = watch.during(METRICS)(metrics_for(_NAME, made.kv).observe_step)
    draw = random.Random(0)
    taken: list[dict[str, float]] = []
    unwatched: list[float] = []
    for watching in [True] * _WARM + draw.sample([True, False], 2 * steps, counts=[steps, steps]):
        watch.drain()
        began = clock()
        seams = _seams(decoder, made, watch) if watching else nullcontext()
        with seams, watch.during(REST):
            observe(_NAME, made.engine.step().stats)
        if watching:
            taken.append(watch.drain())
        else:
            unwatched.append(clock() - began)
    faster = _faster_half(taken[_WARM:], lambda each: sum(each.values()))
    return StepTimes(
        {part: fmean(each[part] for each in faster) for part in PARTS if part in faster[0]},
        fmean(_faster_half(unwatched, float)),
    )


def needed_context(context: int, steps: int) -> int:
    """The greatest length that a request reaches."""
    return context + _WARM + 2 * steps + 1


@contextmanager
def _seams(decoder: Decoder, made: Wired, watch: Stopwatch) -> Iterator[None]:
    """Watch the parts that could not be wrapped when the engine was made."""
    stacks = [each for each in decoder.modules() if isinstance(each, KernelLayers)]
    with ExitStack() as seams:
        for owner, name, part in _watched_in(decoder, made):
            seams.enter_context(watched(owner, name, watch, part))
        told = seams.enter_context(told_by(stacks))
        yield
    if stacks:
        for kind in Part:
            watch.move(float(told[kind]), CALLS, _TOLD[kind])


def _watched_in(decoder: Decoder, made: Wired) -> Iterator[tuple[object, str, str]]:
    """Owner and name of each watched method, and its part."""
    yield made.runner, "build", BATCH
    yield made.runner, "sample", SAMPLING
    yield made.scheduler, "plan", SCHEDULER
    yield made.scheduler, "record", SCHEDULER
    yield made.auditor, "look", AUDIT
    yield made.auditor, "sample", AUDIT
    yield made.meter, "measure", METRICS
    if decoder.one_call is not None:
        yield decoder, "one_call", CALLS
    of_head = set(decoder.head.modules())
    yield decoder.head, "forward", HEAD
    for module in decoder.modules():
        if module in of_head:
            continue
        if type(module) in _MODULES:
            yield module, "forward", _MODULES[type(module)]
        elif hasattr(module, "attend"):
            yield module, "attend", ATTENTION
            if isinstance(module, Attention):
                yield module, "stored", STORE
                yield module, "rotated", POSITION  # within it, unless one kernel does both
        elif isinstance(module, KernelLayers):
            yield module, "forward", CALLS
        elif isinstance(module, TritonLinear):
            yield module, "few", LINEAR  # and what it computes of a layer besides
        elif isinstance(module, TritonLayers):
            yield module, "add_norm", NORM
        elif isinstance(module, PositionalEncoding):
            yield module, "embed", POSITION


def _clock(device: torch.device) -> float:
    """Waits for a GPU at every reading: its work would otherwise count for later parts."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _faster_half(values: Sequence[T], seconds: Callable[[T], float]) -> Sequence[T]:
    """Drops the slower half, which holds the values that other programs disturbed."""
    return sorted(values, key=seconds)[: max(len(values) // 2, 1)]
