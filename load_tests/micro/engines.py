"""Makes engines wired as in the server, with its default audit, to measure costs without one."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.load_tests.micro.in_process import blocks_for, new_cache, replayed, request
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import ModelConfig
from ropewalk.model.decoder import Decoder, Forward
from ropewalk.model.encodings.base import create
from ropewalk.model.kernels.backends import sampler_of
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.sampler import Sampler
from ropewalk.model.weights.checksums import Seals
from ropewalk.server.cli.serve import from_program
from ropewalk.server.config import server_config
from ropewalk.server.engine.assemble import Wired, sums_by, wired
from ropewalk.server.engine.statistics import PositionMeter
from ropewalk.server.launch.build import Loaded, load_models
from ropewalk.server.metrics.exporter import Metrics
from ropewalk.server.scheduling.request import Limits


def loaded(model: str, **options: object) -> Loaded:
    """A model as `ropewalk serve` loads it with these options. Raises CommandError."""
    config = server_config(from_program({"models": [model], **options}))
    (one,) = load_models(config, Metrics())
    return one


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
    """An engine whose `requests` are past their prompts, with room for `steps` more steps.

    Their prompts have up to `context` tokens, with different lengths, so that about the same number
    of requests fill a block in every step. `forward` is by default the `replayed` decoder.
    `kernels` are the CPU's, for what is outside the decoder, or why there are none. ahead: whether
    a step is launched before the previous one's tokens are waited for.
    """
    config, device = decoder.config, decoder.device
    longest = context + steps + 1
    kv = new_cache(decoder, blocks_for(requests, longest))
    compute = forward or replayed(decoder, kv, requests, longest)

    def past_prompts(batch: ForwardBatch, kv: KVCache) -> Tensor:
        if batch.max_query > 1:  # prompts need no computation: the cache is full of numbers anyway
            size = len(batch.output_rows), config.vocab_size
            return torch.zeros(size, dtype=decoder.dtype, device=device)
        logits: Tensor = compute(batch, kv)
        return logits

    made = wired(
        "measured",
        past_prompts,
        kv,
        CacheManager(kv.blocks, kv.block_size),
        [decoder.encoding.for_layer(layer) for layer in range(config.num_layers)],
        # All prompts in one step: otherwise the first requests would grow while the last wait.
        Limits(requests, requests * longest, longest, max_queue=requests),
        PositionMeter(lambda length: decoder.encoding.work(config, length, BLOCK_SIZE)),
        kernels,
        sampler=sampler_of(decoder, kernels),
        weights=Seals(decoder.fixed_tensors(), sums_by(kernels)),
        ahead=ahead,
    )
    draw = random.Random(0)
    for index in range(requests):
        length = max(context - index % BLOCK_SIZE, 1)
        prompt = draw.choices(range(config.vocab_size), k=length)
        made.engine.submit(request(str(index), prompt))
    made.engine.step()
    return made


def idle(
    config: ModelConfig,
    blocks: int,
    *,
    max_seqs: int,
    max_context: int,
    max_step_tokens: int = 512,
    kernels: Kernels | str,
    wait: Callable[[ForwardBatch], object] = lambda batch: None,
) -> Wired:
    """An engine on the CPU that computes nothing: the next token is always 0.

    `blocks` of its cache. A pass takes as long as `wait`.
    """
    device = torch.device("cpu")
    kv = KVCache(config, blocks=blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)

    def first_token(batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Logits of a vocabulary of two, the first of which is the likelier."""
        wait(batch)
        return torch.tensor([[1.0, 0.0]]).expand(len(batch.output_rows), -1)

    encoding = create(config.encoding, config, config.trained_context, device)
    return wired(
        "measured",
        first_token,
        kv,
        CacheManager(kv.blocks, kv.block_size),
        [encoding] * config.num_layers,
        Limits(max_seqs, max_step_tokens, max_context, max_queue=1 << 20),
        PositionMeter(lambda context: encoding.work(config, context, kv.block_size)),
        kernels,
        sampler=Sampler(),
    )
