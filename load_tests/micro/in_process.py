"""Makes decoders, caches and steps as the server does, to measure costs without one."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger

import torch
from torch import Tensor

from ropewalk.cache.kv import KVCache
from ropewalk.cache.manager import CacheManager
from ropewalk.cache.types import BLOCK_SIZE
from ropewalk.load_tests.common.rounds import Call
from ropewalk.load_tests.run.serving import SETTINGS
from ropewalk.model.attention.base import choose, spec_for
from ropewalk.model.batch import ForwardBatch
from ropewalk.model.config import EncoderDecoderConfig, EncodingSpec
from ropewalk.model.decoder import Decoder, Forward
from ropewalk.model.encodings.base import EncodingError, create, names
from ropewalk.model.kernels.backends import all_backends, decoder_on
from ropewalk.model.kernels.cpu.bindings import Kernels
from ropewalk.model.kernels.graphs.cuda_graph import require_device
from ropewalk.model.kernels.graphs.replay import Bucket, ReplayedDecoder
from ropewalk.model.loading.checkpoints import RANDOM, Checkpoint, load_encoding, load_program
from ropewalk.model.loading.random_weights import random_checkpoint
from ropewalk.model.program import Program
from ropewalk.model.recipes import program
from ropewalk.model.sampling import SamplingParams
from ropewalk.server.config import encoding_option
from ropewalk.server.engine.batch import build_batch
from ropewalk.server.launch.graphs import recorder
from ropewalk.server.scheduling.request import Request, Work

log = getLogger(__name__)


class PackedOnce(Kernels):
    """The same kernels, but a weight is packed once and shared by all decoders."""

    def __init__(self, kernels: Kernels) -> None:
        vars(self).update(vars(kernels))
        self._panels: dict[tuple[int, bool], Tensor] = {}

    def pack(self, weight: Tensor, gated: bool = False) -> Tensor:
        """Keyed by address: a weight lives until the last decoder that shares it is packed."""
        key = weight.data_ptr(), gated
        if key not in self._panels:
            self._panels[key] = super().pack(weight, gated)
        return self._panels[key]


def decoders(
    shape: str,
    variants: Sequence[str],
    *,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | str,
) -> dict[str, Decoder]:
    """One decoder for each of `variants`, which differ only in their encoding.

    A variant is an encoding, optionally with one of its forms or storages after a colon (t5:table)
    or with options (rope:near=512+group=8).
    Weights are random, and all decoders share the same tensors. `kernels`: those of the CPU, or
    why there are none. Raises CheckpointError and EncodingError.
    """
    if isinstance(kernels, Kernels):
        kernels = PackedOnce(kernels)
    made: dict[str, Program] = {}
    for variant in variants:
        checkpoint = _checkpoint(shape, variant, context)
        config = checkpoint.config
        assert not isinstance(config, EncoderDecoderConfig), "a shape is a decoder alone"
        encoding = create(config.encoding, config, context, device)
        if made:
            load_encoding(checkpoint, encoding)
            made[variant] = program(config, next(iter(made.values())).weights, encoding)
        else:
            made[variant] = load_program(checkpoint, encoding, dtype=dtype, device=device)
    backends = all_backends(kernels)
    return {
        variant: decoder_on(
            choose(backends, spec_for(each.config, dtype, device, each.encoding)), each, kernels
        )
        for variant, each in made.items()
    }


def new_cache(decoder: Decoder, blocks: int, gates: int = 0) -> KVCache:
    """A cache full of numbers of a realistic size, so that no kernel meets a special case.

    gates: as in KVCache, if others than the decoder need more. They forget so little that no key
    is left out.
    """
    kv = untouched_cache(decoder, blocks, gates=gates)
    generator = torch.Generator(kv.device).manual_seed(0)
    for part in kv.whole:
        part.normal_(generator=generator)
    if kv.whole.gates is not None:
        kv.whole.gates.abs_().mul_(-1e-4)
    return kv


def untouched_cache(
    decoder: Decoder, blocks: int, *, dtype: torch.dtype | None = None, gates: int = 0
) -> KVCache:
    """Takes no memory on a CPU until it is written to. dtype: if not the decoder's."""
    return KVCache(
        decoder.config,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        dtype=dtype or decoder.dtype,
        device=decoder.device,
        gates=max(gates, decoder.gates),
    )


def blocks_for(requests: int, context: int) -> int:
    """Blocks of a cache that holds that many requests, including the reserved block."""
    return 1 + requests * -(-context // BLOCK_SIZE)


def step(requests: int, context: int, rows: int, device: torch.device) -> ForwardBatch:
    """The step that computes the last `rows` tokens of each request's `context`.

    It outputs the logits of each request's last token. The cache must have `blocks_for` them.
    """
    return step_of([request(str(i), [7] * context) for i in range(requests)], rows, device)


def step_of(requests: Sequence[Request], rows: int, device: torch.device) -> ForwardBatch:
    """The same of these requests, which have equally many tokens."""
    context = len(requests[0].tokens)
    manager = CacheManager(blocks_for(len(requests), context), BLOCK_SIZE, prefix_sharing=False)
    for each in requests:
        manager.reserve(each.id, each.tokens, context)
    work = tuple(Work(each, context - rows, rows) for each in requests)
    return build_batch(work, manager.table, BLOCK_SIZE).forward.to(device)


def passes(
    made: Mapping[str, Decoder], kv: KVCache, requests: int, context: int, rows: int
) -> dict[str, Call]:
    """Each decoder's pass over the same `step`, whose batch is on the host at first."""
    batch = step(requests, context, rows, torch.device("cpu"))
    forwards: Mapping[str, Forward] = made
    if rows == 1:
        forwards = {
            variant: replayed(decoder, kv, requests, context) for variant, decoder in made.items()
        }
    return {variant: partial(forward, batch, kv) for variant, forward in forwards.items()}


def replayed(decoder: Decoder, kv: KVCache, requests: int, context: int) -> Forward:
    """The decoder, with decode steps of this size recorded if the server would record them."""
    record = recorder(decoder)
    if record is None:
        return decoder
    try:
        return ReplayedDecoder(decoder, kv, decoder, [Bucket(requests, context, kv)], record)
    except RuntimeError as error:  # as in the server: out of memory, or something else
        require_device(error, decoder.device)
        log.warning("batch %d, context %d without CUDA graphs: %s", requests, context, error)
        return decoder


def request(name: str, prompt: list[int], max_tokens: int = 1 << 30) -> Request:
    """A greedy request that ends after `max_tokens`."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, prompt, len(prompt), params, 0.0, random.Random(0))


def _checkpoint(shape: str, variant: str, context: int) -> Checkpoint:
    name, _, variant = variant.partition(":")
    options = {}
    if "=" in variant and name in names():
        options = dict(encoding_option(each) for each in variant.split("+"))
    elif variant and name not in SETTINGS:
        if name in names():
            raise EncodingError(
                f"{variant}: {name} has no forms or storages; leave out {variant!r}."
            )
        name = variant  # package.module:Class
    elif variant:
        option, _ = SETTINGS[name]
        options = {option: variant}
    checkpoint = random_checkpoint(f"{RANDOM}{shape}", name, context)
    spec = checkpoint.config.encoding
    spec = EncodingSpec(name, {**spec.options, **options})
    return replace(checkpoint, config=replace(checkpoint.config, encoding=spec))
