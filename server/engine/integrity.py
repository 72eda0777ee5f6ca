"""Has the cache and the weights verified, and ends the requests that a change affects."""

from dataclasses import dataclass, replace
from logging import getLogger

from ropewalk.cache.ledger import Fault, Ledger, LedgerCounts
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import Audit
from ropewalk.model.weights.checksums import Seals
from ropewalk.server.engine.cache_view import AuditView
from ropewalk.server.errors import CacheChanged, ModelWithdrawn, ServeError, WeightsChanged
from ropewalk.server.scheduling.request import TokenEvent, owner
from ropewalk.server.scheduling.scheduler import Scheduler

log = getLogger(__name__)

_NOTHING = LedgerCounts()
# Portions of the weights to be verified in each step: all of them in 1,024 steps, or in 16.
PORTIONS = {Audit.OFF: 0, Audit.SAMPLE: 1, Audit.FULL: 64}


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """What was done and found since the last `drain`."""

    blocks: LedgerCounts = _NOTHING
    verified_weights: int = 0  # bytes
    changed_weights: int = 0  # chunks, of which one is enough


class Auditor:
    """Called between two writes to one model's cache. `model` is its name in the log."""

    def __init__(
        self,
        model: str,
        ledger: Ledger,
        manager: CacheManager,
        scheduler: Scheduler,
        weights: Seals | None = None,
    ) -> None:
        self.mutated_blocks = 0  # since the start
        self.weights_changed = False
        self._model = model
        self.ledger = ledger
        self._manager = manager
        self._scheduler = scheduler
        self._weights = Seals({}) if weights is None else weights
        self._counts = AuditCounts()
        self._ever = _NOTHING

    def view(self) -> AuditView:
        """What was done and found since the start."""
        ever, mode = self._ever, self.ledger.mode
        now = len(self.ledger.sealed)
        return AuditView(mode, now, ever.sealed, ever.verified, self.mutated_blocks)

    def look(self) -> list[TokenEvent]:
        """Seal and verify blocks filled, shared or released; returns ends of failed requests."""
        ends = []
        # A request that ends releases more blocks, which are verified in turn.
        while faults := self._observe():
            for fault in faults:
                ends += self._isolate(fault)
        if self.mutated_blocks:
            ends += self._scheduler.end_misfits()
        return ends

    def sample(self) -> list[TokenEvent]:
        """Also verify blocks that were longest unverified, and some of the weights.

        Returns ends of failed requests.
        """
        self.ledger.sample()
        return self.look() + self._weigh()

    def refusal(self) -> ServeError | None:
        """Why the model must not begin another answer."""
        if not self.weights_changed:
            return None
        return ModelWithdrawn(
            f"The weights of {self._model} changed in memory, so it answers nothing until the "
            "server is restarted; send the request to another server."
        )

    def drain(self) -> AuditCounts:
        """What was done and found since the last call."""
        counts, self._counts = self._counts, AuditCounts()
        return counts

    def _weigh(self) -> list[TokenEvent]:
        if self.weights_changed:  # to look for more would find the same again
            return []
        verified, changed = self._weights.verify(PORTIONS[self.ledger.mode])
        if verified:
            self._counts = replace(
                self._counts,
                verified_weights=self._counts.verified_weights + verified,
                changed_weights=self._counts.changed_weights + len(changed),
            )
        if not changed:
            return []
        self.weights_changed = True
        log.error(
            "the weights of %s changed in memory: %s; it answers nothing until the server is "
            "restarted",
            self._model,
            ", ".join(f"{each.tensor} bytes {each.first} to {each.last}" for each in changed),
        )
        error = WeightsChanged(
            f"The weights of {self._model} changed in memory, so this answer may be wrong; send "
            "the request to another server."
        )
        return self._scheduler.fail_all(error) + self.look()

    def _observe(self) -> tuple[Fault, ...]:
        events = self._manager.drain_events()
        if events:
            self.ledger.observe(events)
        counts = self.ledger.drain()
        if counts.sealed or counts.verified:  # in most steps neither
            self._counts = replace(self._counts, blocks=self._counts.blocks + counts)
            self._ever += replace(counts, faults=())
        return counts.faults

    def _isolate(self, fault: Fault) -> list[TokenEvent]:
        """Never use the block again, and end the requests that hold it or have just released it."""
        self.mutated_blocks += 1
        sequences = dict.fromkeys((*fault.sequences, *self._manager.holders(fault.block)))
        log.error(
            "a cached block of %s changed: block %d, %s, %s; sequences %s",
            self._model,
            fault.block,
            ", ".join(f"layer {place.layer} {place.part.value}" for place in fault.places),
            self._positions(fault),
            ", ".join(sequences) or "none",
        )
        self._manager.quarantine(fault.block)
        self.ledger.forget([fault.block])
        error = CacheChanged("A cached block that this answer depends on changed; retry.")
        ends = [self._scheduler.fail(each, error) for each in dict.fromkeys(map(owner, sequences))]
        return [end for end in ends if end is not None]

    def _positions(self, fault: Fault) -> str:
        base = fault.base
        for name in self._manager.holders(fault.block)[:1]:
            table = self._manager.table(name)
            base = table.bases[table.blocks.index(fault.block)]
        if base is None:
            return "positions unknown"
        return f"positions {base} to {base + self._manager.block_size - 1}"
