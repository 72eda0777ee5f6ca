"""Decode steps as CUDA graphs, recorded when a model is made ready to serve."""

import sys
from logging import getLogger

from tqdm import tqdm

from cache.kv import KVCache
from model.attention.triton import TritonAttention
from model.cuda_graph import CudaGraphs
from model.encoder_decoder import EncoderDecoder
from model.replay import Forward, Record, ReplayedDecoder, buckets
from model.transformer import Decoder
from server.scheduler import Limits

log = getLogger(__name__)


def replayed(
    decoder: Decoder | EncoderDecoder,
    kv: KVCache,
    limits: Limits,
    name: str,
    *,
    otherwise: Forward,
) -> Forward:
    """What computes a model's steps: `otherwise`, but for those that are recorded now."""
    record = recorder(decoder)
    if record is None:
        return otherwise
    try:
        made = buckets(kv, limits.max_seqs, limits.max_context)
        told = f"recording {name}"
        with tqdm(made, desc=told, unit="graph", leave=False, file=sys.stderr) as bar:
            return ReplayedDecoder(decoder, kv, otherwise, bar, record)
    except RuntimeError as error:  # what torch raises when there is no memory, and for much else
        log.warning("serving %s without CUDA graphs, slower where steps are short: %s", name, error)
        return otherwise


def recorder(decoder: Decoder | EncoderDecoder) -> Record | None:
    """A GPU's, where Triton attends: it alone passes over what a bucket holds and a step does not.

    None of an encoder-decoder, whose steps have no buckets.
    """
    attending = [each.attend for each in decoder.modules() if hasattr(each, "attend")]
    triton = any(isinstance(attend, TritonAttention) for attend in attending)
    if not triton or not isinstance(decoder, Decoder):
        return None
    return CudaGraphs(decoder.embed.weight.device)
