"""Engines without a server, wired as the server wires them: for costs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.kv import KVCache
from cache.ledger import FoldSums, Ledger, fold_sums
from cache.manager import CacheManager
from cache.operations import Operations
from cache.terms import Audit
from load_tests.in_process import BLOCK_SIZE, blocks_for, new_cache, replayed, request
from model.batch import ForwardBatch
from model.config import ModelConfig
from model.encodings.base import PositionalEncoding, create
from model.kernels.build import Kernels
from model.kernels.sampler import KernelSampler
from model.replay import Forward
from model.sampler import Sampler
from model.transformer import Decoder
from server.auditing import Auditor
from server.engine import Engine
from server.plan import Limits
from server.position_meter import PositionMeter
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


def decoding(
    decoder: Decoder,
    requests: int,
    context: int,
    steps: int,
    *,
    kernels: Kernels | str,
    forward: Forward | None = None,
    ahead: bool = False,
) -> Wired:
    """An engine whose `requests` are past their prompts, with room for `steps` steps more.

    They begin with up to `context` tokens, of different number, so that in every step about as
    many fill a block. `forward` is the decoder, `replayed`, unless it is told. `kernels` are those
    of the CPU, for what is not in the decoder, or why there are none. ahead: whether the device is
    told of a step before the one before it is waited for.
    """
    config, weight = decoder.config, decoder.embed.weight
    longest = context + steps + 1
    kv = new_cache(config, blocks_for(requests, longest), dtype=weight.dtype, device=weight.device)
    compute = forward or replayed(decoder, kv, requests, longest)

    def past_prompts(batch: ForwardBatch, kv: KVCache) -> Tensor:
        if batch.max_query > 1:  # a prompt is not computed: the cache is full of numbers anyway
            return weight.new_zeros(len(batch.output_rows), config.vocab_size)
        logits: Tensor = compute(batch, kv)
        return logits

    made = wired(
        past_prompts,
        kv,
        [decoder.encoding.for_layer(layer) for layer in range(config.layers)],
        PositionMeter(lambda length: decoder.encoding.work(config, length, BLOCK_SIZE)),
        # All prompts in one step: else the first requests would grow while the last wait.
        Limits(requests, requests * longest, longest, max_waiting=requests),
        KernelSampler(kernels) if isinstance(kernels, Kernels) else Sampler(),
        sums=kernels.fold_sums if isinstance(kernels, Kernels) else fold_sums,
        ahead=ahead,
    )
    draw = random.Random(0)
    for index in range(requests):
        length = max(context - index % BLOCK_SIZE, 1)
        prompt = draw.choices(range(config.vocab_size), k=length)
        made.engine.submit(request(str(index), prompt))
    made.engine.step()
    return made


def wired(
    forward: Forward,
    kv: KVCache,
    rules: Sequence[PositionalEncoding],
    meter: PositionMeter,
    limits: Limits,
    sampler: Sampler,
    *,
    sums: FoldSums = fold_sums,
    ahead: bool = False,
) -> Wired:
    """As the server wires it, over all of `kv`, with its default audit. `rules` of each layer."""
    manager = CacheManager(kv.whole.keys.shape[1], kv.block_size)
    ledger = Ledger(kv, Audit.SAMPLE, sums)
    scheduler = Scheduler(manager, limits, Operations(manager, kv, rules, ledger))
    auditor = Auditor("here", ledger, manager, scheduler)
    runner = Runner(forward, kv, manager, sampler)
    launch = runner.launch if ahead else None
    engine = Engine(runner, kv, manager, scheduler, auditor, meter, launch=launch)
    return Wired(engine, runner, kv, scheduler, auditor, meter)


def engine(
    config: ModelConfig,
    kv: KVCache,
    *,
    max_seqs: int,
    max_context: int,
    max_step_tokens: int = 512,
    sums: FoldSums = fold_sums,
) -> Engine:
    """As the server wires it, over all of `kv`, with its default audit; but it computes nothing.

    The next token is always 0. `sums` are the checksums of the kernels, where there are any.
    """
    encoding = create(config.encoding, config, config.trained_context, kv.device)
    return wired(
        _first_token,
        kv,
        [encoding] * config.layers,
        PositionMeter(lambda context: encoding.work(config, context, kv.block_size)),
        Limits(max_seqs, max_step_tokens, max_context, max_waiting=1 << 20),
        Sampler(),
        sums=sums,
    ).engine


def _first_token(batch: ForwardBatch, kv: KVCache) -> Tensor:
    """Logits of a vocabulary of two, the first of which is the likelier."""
    return torch.tensor([[1.0, 0.0]], device=kv.device).expand(len(batch.output_rows), -1)
