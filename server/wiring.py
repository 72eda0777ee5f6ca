"""Assembles an engine from its parts, for serving and for measuring."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.kv import KVCache
from cache.ledger import FoldSums, Ledger, fold_sums
from cache.manager import CacheManager
from cache.operations import Operations
from cache.terms import Audit
from model.encodings.base import PositionalEncoding
from model.kernels.build import Kernels
from model.kernels.sampler import KernelSampler
from model.replay import Forward
from model.sampler import Sampler
from model.seals import Seals
from server.auditing import Auditor
from server.engine import Engine
from server.plan import Limits
from server.position_meter import PositionMeter
from server.request import PassTimes
from server.runner import Runner
from server.scheduler import Scheduler


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
    ledger: Ledger | None = None,
    weights: Seals | None = None,
    drain_times: Callable[[], tuple[PassTimes, ...]] = tuple,
    ahead: bool = False,
) -> Wired:
    """An engine that uses all of `kv`, whose blocks `manager` allocates.

    name: the model's. rules: each layer's encoding. kernels: the CPU kernels, or why there are
    none. ledger: `ledger_of` by default. weights: their checksums, which are verified as the
    ledger's audit says. ahead: whether a step is launched before the previous one's tokens are
    waited for.
    """
    sampler = KernelSampler(kernels) if isinstance(kernels, Kernels) else Sampler()
    ledger = ledger or ledger_of(kv, kernels)
    scheduler = Scheduler(manager, limits, Operations(manager, kv, rules, ledger))
    auditor = Auditor(name, ledger, manager, scheduler, weights)
    runner = Runner(forward, kv, manager, sampler)
    launch = runner.launch if ahead else None
    engine = Engine(
        runner, kv, manager, scheduler, auditor, meter, drain_times=drain_times, launch=launch
    )
    return Wired(engine, runner, kv, scheduler, auditor, meter)
