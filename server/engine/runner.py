"""Turns the work of a step into tokens: build batch, forward, sample."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import CacheManager
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.sampler import Sampler
from ropewalk.server.engine.batch import StepBatch
from ropewalk.server.engine.sampling import Sampling, sample
from ropewalk.server.engine.step_batches import StepBatches
from ropewalk.server.scheduling.plan import Sampled, Work

Run = Callable[[tuple[Work, ...]], Mapping[str, Sampled]]  # by request id
Launch = Callable[[tuple[Work, ...], Sampling | None], Sampling]


class Runner:
    """`forward` is a decoder, or in tests any function of a batch and a cache to logits."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch, KVCache], Tensor],
        kv: KVCache,
        manager: CacheManager,
        sampler: Sampler,
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._sampler = sampler
        self._batches = StepBatches(manager.table, kv.block_size)

    def __call__(self, work: tuple[Work, ...]) -> Mapping[str, Sampled]:
        """The next token of every request whose last known token is computed in this step."""
        batch = self.build(work)
        return self.sample(self._forward(batch.forward, self._kv), batch)

    def launch(self, work: tuple[Work, ...], after: Sampling | None) -> Sampling:
        """Like a call, but without waiting for the device; every request must get a token.

        Work that continues from tokens that were not read back yet takes them from `after`.
        """
        batch = self.build(work)
        forward = batch.forward
        if after is not None:
            forward = replace(forward, coming=after.tokens([each.request for each in work]))
        return Sampling(self._forward(forward, self._kv), batch, self._sampler)

    def build(self, work: tuple[Work, ...]) -> StepBatch:
        return self._batches.of(work)

    def sample(self, logits: Tensor, batch: StepBatch) -> Mapping[str, Sampled]:
        return sample(logits, batch, self._sampler)
