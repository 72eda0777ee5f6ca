"""Decode steps as CUDA graphs, recorded when a model is made ready to serve."""

import sys
from logging import getLogger

from tqdm import tqdm

from cache.kv import KVCache
from model.attention.base import AttentionBackend
from model.attention.triton import TritonAttention
from model.cuda_graph import CudaGraphs
from model.encoder_decoder import EncoderDecoder
from model.replay import Forward, ReplayedDecoder, buckets
from model.transformer import Decoder
from server.scheduler import Limits

log = getLogger(__name__)


def replayed(
    decoder: Decoder | EncoderDecoder,
    backend: AttentionBackend,
    kv: KVCache,
    limits: Limits,
    name: str,
    *,
    otherwise: Forward,
) -> Forward:
    """What computes the steps of a model: `otherwise`, but for those that are replayed.

    Only Triton's attention leaves alone what a bucket has room for and a step has not, and an
    encoder-decoder's steps have no buckets.
    """
    if backend is not TritonAttention or not isinstance(decoder, Decoder):
        return otherwise
    made = buckets(kv, limits.max_seqs, limits.max_context)
    try:
        with tqdm(
            made, desc=f"recording {name}", unit="graph", leave=False, file=sys.stderr
        ) as bar:
            return ReplayedDecoder(decoder, kv, otherwise, bar, CudaGraphs(kv.device))
    except RuntimeError as error:  # what torch raises when there is no memory, and for much else
        log.warning("serving %s without CUDA graphs, slower where steps are short: %s", name, error)
        return otherwise
