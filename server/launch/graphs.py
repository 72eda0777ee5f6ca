"""Decode steps as CUDA graphs, recorded when a model is made ready to serve."""

import sys
from dataclasses import replace
from logging import getLogger

import torch
from tqdm import tqdm

from ropewalk.cache.kv import KVCache
from ropewalk.model.batch import Cross, ForwardBatch
from ropewalk.model.config import EncoderDecoderConfig
from ropewalk.model.decoder import Decoder, Forward
from ropewalk.model.kernels.graphs.cuda_graph import CudaGraphs, require_device
from ropewalk.model.kernels.graphs.replay import CROWDED, Bucket, Record, ReplayedDecoder, buckets
from ropewalk.server.launch.self_check import TOLERANCES
from ropewalk.server.scheduling.request import Limits

log = getLogger(__name__)


def record_graphs(
    decoder: Decoder,
    kv: KVCache,
    limits: Limits,
    name: str,
    *,
    otherwise: Forward,
    alone: bool = True,
) -> Forward:
    """A forward pass that replays recorded CUDA graphs and leaves other steps to `otherwise`.

    Records in the cache's reserved block 0, which `warm_up` has filled. Returns `otherwise` itself
    where nothing can be recorded. alone: no other model is computed meanwhile.
    """
    record = recorder(decoder, alone=alone)
    if record is None:
        return otherwise
    try:
        encoded = isinstance(decoder.config, EncoderDecoderConfig)
        crowded = 1 if decoder.has_dense_bias else CROWDED
        made = buckets(kv, limits.max_seqs, limits.max_context, encoded=encoded, crowded=crowded)
        told = f"recording {name}"
        with tqdm(made, desc=told, unit="graph", leave=False, file=sys.stderr) as bar:
            over = ReplayedDecoder(decoder, kv, otherwise, bar, record)
        if all(_agrees(over, decoder, kv, bucket) for bucket in made):
            return over
        log.error(
            "CUDA graphs of %s compute different logits from its decoder, so it is served without "
            "them",
            name,
        )
        return otherwise
    except RuntimeError as error:  # torch raises it when out of memory, and for much else
        require_device(error, decoder.device)
        log.warning(
            "serving %s without CUDA graphs, which is slower when steps are short: %s", name, error
        )
        return otherwise


def recorder(decoder: Decoder, *, alone: bool = True) -> Record | None:
    """Records CUDA graphs of the decoder's passes, if its executor's can be recorded."""
    return CudaGraphs(decoder.device, alone=alone) if decoder.executor.recordable else None


def _agrees(over: ReplayedDecoder, decoder: Decoder, kv: KVCache, bucket: Bucket) -> bool:
    """Whether replaying a full bucket gives the decoder's logits up to rounding."""
    batch = _within_block_0(bucket, kv.block_size, decoder.config.vocab_size)
    replayed, plain = over(batch, kv), decoder(batch, kv)
    return bool((replayed - plain).abs().max() <= TOLERANCES[kv.dtype] * plain.abs().max())


def _within_block_0(bucket: Bucket, block_size: int, vocab: int) -> ForwardBatch:
    """A step of as many requests as the bucket has, each at one of block 0's slots."""
    requests, size = bucket.requests, min(block_size, bucket.context)
    slots = size - 1 - torch.arange(requests) % size
    tables = torch.zeros(requests, -(-bucket.context // block_size), dtype=torch.int64)
    batch = ForwardBatch(
        tokens=slots % vocab,
        positions=slots,
        offsets=slots,
        slots=slots,
        query_starts=torch.arange(requests + 1),
        context_lens=slots + 1,
        block_tables=tables,
        block_bases=tables,
        output_rows=torch.arange(requests),
        max_query=1,
        max_context=bucket.context,  # or a smaller bucket would be replayed
    )
    return batch if bucket.batch.cross is None else replace(batch, cross=Cross(None, batch))
