"""Passes block events to the ledger, and ends the requests that a changed block affects."""

from dataclasses import replace
from logging import getLogger

from cache.ledger import Fault, Ledger, LedgerCounts
from cache.manager import CacheManager
from server.cache_view import AuditView
from server.request import CacheChanged, TokenEvent, owner
from server.scheduler import Scheduler

log = getLogger(__name__)

_NOTHING = LedgerCounts()


class Auditor:
    """Called between two writes to one model's cache. `model` is its name in the log."""

    def __init__(
        self, model: str, ledger: Ledger, manager: CacheManager, scheduler: Scheduler
    ) -> None:
        self.mutated_blocks = 0  # since the start
        self._model = model
        self._ledger = ledger
        self._manager = manager
        self._scheduler = scheduler
        self._counts = _NOTHING
        self._ever = _NOTHING

    def view(self) -> AuditView:
        """What was done and found since the start."""
        ever, mode = self._ever, self._ledger.mode
        now = len(self._ledger.sealed)
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
        """Also verify blocks that were longest unverified; returns ends of failed requests."""
        self._ledger.sample()
        return self.look()

    def drain(self) -> LedgerCounts:
        """What was done and found since the last call."""
        counts, self._counts = self._counts, _NOTHING
        return counts

    def _observe(self) -> tuple[Fault, ...]:
        events = self._manager.drain_events()
        if events:
            self._ledger.observe(events)
        counts = self._ledger.drain()
        if counts.sealed or counts.verified:  # in most steps neither
            self._counts += counts
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
        self._ledger.forget([fault.block])
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
