"""Assembles an engine from its parts, for serving and for measuring."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.cache.kv import KVCache
from ropewalk.cache.ledger import FoldSums, Ledger, fold_sums
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.operations import Operations
from ropewalk.cache.types import Audit
from ropewalk.model.decoder import Forward
from ropewalk.model.encodings.base import PositionalEncoding
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.sampler import Sampler
from ropewalk.model.weights.checksums import Seals
from ropewalk.server.engine.engine import Engine, Runner
from ropewalk.server.engine.integrity import Auditor
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.scheduling.request import Limits, PassTimes
from ropewalk.server.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Wired:
    """An engine and what it was made of."""

    engine: Engine
    runner: Runner
    kv: KVCache
    scheduler: Scheduler
    auditor: Auditor
    meter: PositionMeter


def sums_by(kernels: Kernels | str) -> FoldSums:
    """The fastest way to compute checksums."""
    return kernels.fold_sums if isinstance(kernels, Kernels) else fold_sums


def ledger_of(kv: KVCache, kernels: Kernels | str, audit: Audit = Audit.SAMPLE) -> Ledger:
    """The ledger of `kv`, which takes checksums with the CPU kernels if there are any."""
    return Ledger(kv, audit, sums_by(kernels))


def wired(
    name: str,
    forward: Forward,
    kv: KVCache,
    manager: CacheManager,
    rules: Sequence[PositionalEncoding],
    limits: Limits,
    meter: PositionMeter,
    kernels: Kernels | str,
    *,
    sampler: Sampler,
    ledger: Ledger | None = None,
    weights: Seals | None = None,
    drain_times: Callable[[], tuple[PassTimes, ...]] = tuple,
    ahead: bool = False,
) -> Wired:
    """An engine that uses all of `kv`, whose blocks `manager` allocates.

    name: the model's. rules: each layer's encoding. kernels: the CPU kernels, or why there are
    none. sampler: picks tokens. ledger: `ledger_of` by default. weights: their checksums, which are
    verified as the ledger's audit says. ahead: whether a step is launched before the previous
    one's tokens are waited for.
    """
    ledger = ledger or ledger_of(kv, kernels)
    scheduler = Scheduler(manager, limits, Operations(manager, kv, rules, ledger))
    auditor = Auditor(name, ledger, manager, scheduler, weights)
    runner = Runner(forward, kv, manager, sampler)
    launch = runner.launch if ahead else None
    engine = Engine(
        runner, kv, manager, scheduler, auditor, meter, drain_times=drain_times, launch=launch
    )
    return Wired(engine, runner, kv, scheduler, auditor, meter)
